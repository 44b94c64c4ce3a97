"""Pictures of the README, each rebuilt from emulated runs or from the catalogue: `python -m plots`."""
