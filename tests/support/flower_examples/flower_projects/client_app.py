"""The project with mods of its own, and ours before them."""

from flower_ext.federation import client_level_dp_mod
from flower_projects.projects import custom_mods

app = custom_mods(client_level_dp_mod())
