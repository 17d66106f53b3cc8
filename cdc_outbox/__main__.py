from cdc_outbox.cli import main

main()
