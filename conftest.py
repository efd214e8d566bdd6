"""What all tests share: the harness that runs a test on several ranks."""

pytest_plugins = ["vescale_testing.plugin"]
