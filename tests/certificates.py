"""A certificate authority of a test's own, and what it issues: for brokers, servers and clients on 127.0.0.1."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Certificate:
    """PEM files. `chain` holds key and certificate in one, as Kafka wants them."""

    certificate: Path
    key: Path
    chain: Path


class Authority:
    def __init__(self, directory: Path, name: str = "test authority") -> None:
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._key = directory / "ca.key"
        self.certificate = directory / "ca.crt"
        self._openssl("req", "-x509", *_NEW_KEY, "-keyout", self._key, "-out", self.certificate, "-subj", f"/CN={name}")

    def issue(self, name: str, *, address: str = "127.0.0.1", password: str = "") -> Certificate:
        """For whoever calls itself `name`, at `address`; `password` locks the key."""
        made = [self._directory / f"{name}.{end}" for end in ("crt", "key", "pem")]
        request, extensions = self._directory / f"{name}.csr", self._directory / f"{name}.ext"
        extensions.write_text(f"subjectAltName=IP:{address}\n")
        lock = ["-passout", f"pass:{password}"] if password else ["-noenc"]
        self._openssl("req", *_NEW_KEY[:-1], *lock, "-keyout", made[1], "-out", request, "-subj", f"/CN={name}")
        signed_by: list[str | Path] = ["-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial", "-days", "2"]
        self._openssl("x509", "-req", "-in", request, *signed_by, "-extfile", extensions, "-out", made[0])
        made[2].write_bytes(made[1].read_bytes() + made[0].read_bytes())
        return Certificate(*made)

    def _openssl(self, *args: str | Path) -> None:
        subprocess.run(["openssl", *args], check=True, capture_output=True, cwd=self._directory)


# Elliptic curves: made in milliseconds.
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc")


def have_openssl() -> bool:
    return shutil.which("openssl") is not None
