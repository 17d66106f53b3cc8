"""What a person types: examples that hold, words that were mistyped, completion, no colours."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import click
import pytest

from cdc_outbox.cli import SHELLS, cli
from cdc_outbox.config import Settings, check
from cdc_outbox.librdkafka_names import PROPERTIES
from cdc_outbox.options import commands
from tests.fix_command import EXECUTABLE

LEAVES = commands(cli)
EXAMPLES = [
    (name, line.strip())
    for name, command in LEAVES.items()
    for line in (command.epilog or "").splitlines()
    if line.startswith("  ")
]


def run(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CDC_OUTBOX_")}
    return subprocess.run(
        [str(EXECUTABLE), *args], capture_output=True, text=True, env={**clean, **variables}, timeout=60
    )


def parsed(line: str) -> tuple[str, click.Context]:
    """The command's full name and its context, as the shell and click take the line."""
    program, *args = shlex.split(re.sub(r" > \S+$", "", line))
    assert program == "cdc-outbox"
    command: click.Command = cli
    context = click.Context(cli)
    name: list[str] = []
    while isinstance(command, click.Group):
        word, inner, args = command.resolve_command(context, args)
        assert word is not None
        assert inner is not None
        command = inner
        name.append(word)
    return " ".join(name), command.make_context(name[-1], args, parent=context)


# -- --help ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LEAVES)
def test_each_commands_help_has_two_examples_of_it(name: str) -> None:
    own = [line for owner, line in EXAMPLES if owner == name]
    assert len(own) == 2
    assert len(set(own)) == 2
    shown = run(*name.split(), "--help").stdout
    assert all(f"  {line}\n" in shown for line in own)


@pytest.mark.parametrize(("name", "line"), EXAMPLES)
def test_an_example_is_one_that_the_command_takes(name: str, line: str) -> None:
    found, context = parsed(line)
    assert found == name
    known = {field.name for field in fields(Settings)}
    given = {key: value for key, value in context.params.items() if key in known}
    given = {key: None if value == "off" else value for key, value in given.items()}
    check(Settings(**given), streaming=name == "stream")


def test_an_example_that_has_rotted_is_found() -> None:
    with pytest.raises(click.UsageError):
        parsed("cdc-outbox stream --no-such-option")
    with pytest.raises(click.UsageError):
        parsed("cdc-outbox streams")


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "cdc_outbox", "--version"], capture_output=True, text=True, timeout=60)
    assert done.stdout == run("--version").stdout
    assert done.returncode == 0


@pytest.mark.parametrize("args", [["--help"], ["stream", "--help"], ["stream", "--no-such-option"], ["strem"]])
def test_nothing_is_coloured(args: list[str]) -> None:
    """Whoever sets NO_COLOR gets what everybody gets."""
    for variables in ({"NO_COLOR": "1"}, {}, {"FORCE_COLOR": "1", "CLICOLOR_FORCE": "1"}):
        done = run(*args, **variables)
        assert "\x1b" not in done.stdout + done.stderr


# -- what was mistyped ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["strem"], ["no such command 'strem'. Did you mean 'stream'?"]),
        (["dead-letter", "list"], ["Did you mean 'dead-letters'?"]),
        (["dead-letters", "rety"], ["no such command 'rety'. Did you mean 'retry'?"]),
        (["xyzzy"], ["no such command 'xyzzy'; there are init-slot, "]),
        (["stream", "--slto", "x"], ["--slto", "--slot"]),
        (["stream", "--on-gap", "recovr"], ["recovr", "recover"]),
        (["completion", "bsh"], ["bsh", "bash"]),
        (["stream", "-b", "127.0.0.1:1", "-X", "lingr.ms=5"], ["lingr.ms", "did you mean linger.ms?"]),
        (["stream", "-b", "127.0.0.1:1", "-X", "sasl.mecanism=PLAIN"], ["did you mean sasl.mechanism?"]),
    ],
)
def test_a_mistyped_word_is_answered_with_the_right_one(args: list[str], words: list[str]) -> None:
    done = run(*args)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    ("key", "meant"), [("slto", "slot"), ("purge_evry", "purge-every"), ("bootstrap", "bootstrap-servers")]
)
def test_a_mistyped_key_of_the_configuration_is_answered_with_the_right_one(
    tmp_path: Path, key: str, meant: str
) -> None:
    path = tmp_path / "relay.toml"
    path.write_text(f"{key} = 'x'\n")
    done = run("status", "--config", str(path))
    assert done.returncode == 2
    assert f"unknown key '{key}'" in done.stderr
    assert f"did you mean '{meant}'?" in done.stderr


def test_librdkafka_knows_each_name_that_is_offered() -> None:
    from cdc_outbox.errors import ConfigError
    from cdc_outbox.kafka import KafkaProducer

    unknown = []
    for name in sorted(PROPERTIES):
        try:
            KafkaProducer("127.0.0.1:1", {name: "x"}).close(0)
        except ConfigError as error:
            if "No such" in str(error):
                unknown.append(name)
    assert unknown == []


# -- completion -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_has_a_script_that_asks_the_command(shell: str) -> None:
    done = run("completion", shell)
    assert done.returncode == 0
    assert f"_CDC_OUTBOX_COMPLETE={shell}_complete" in done.stdout
    assert done.stderr == ""


def completed(typed: str) -> list[str]:
    """What bash offers for the last word of `typed`, with the script sourced."""
    words = typed.split(" ")
    script = f"""
        eval "$(cdc-outbox completion bash)"
        COMP_WORDS=({" ".join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}; COMPREPLY=()
        "$(complete -p cdc-outbox | sed 's/.* -F \\([^ ]*\\) .*/\\1/')" cdc-outbox
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    path = f"{EXECUTABLE.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "--norc", "-c", script], capture_output=True, text=True, env={"PATH": path, "HOME": "/"}, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash_completes_commands_options_and_choices() -> None:
    assert completed("cdc-outbox st") == ["status", "stream"]
    assert completed("cdc-outbox dead-letters re") == ["retry"]
    assert completed("cdc-outbox stream --on-g") == ["--on-gap"]
    assert completed("cdc-outbox stream --on-gap ") == ["halt", "recover"]
    assert set(completed("cdc-outbox completion ")) == set(SHELLS)
    assert set(completed("cdc-outbox ")) == {name.split()[0] for name in LEAVES}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_can_read_their_script(shell: str) -> None:
    executable = shutil.which(shell)
    if executable is None:
        pytest.skip(f"no {shell}")
    done = subprocess.run(
        [executable, "-n"], input=run("completion", shell).stdout, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
