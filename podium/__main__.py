"""`python -m podium`."""

from podium.cli.main import main

main()
