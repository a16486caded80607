"""What can be optimised, by name. One file per family; each can be read beside another."""

OBJECTIVES = {"vgrpo": "vgrpo.objectives.vgrpo:VGRPO"}
