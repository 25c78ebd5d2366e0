"""The tests of the recipes use the fixtures of the package's tests."""

pytest_plugins = ["conftest"]  # tests/conftest.py, by pytest's `pythonpath`
