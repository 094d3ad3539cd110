from core_fixtures import *  # noqa: F403  # fixtures are found by their names
