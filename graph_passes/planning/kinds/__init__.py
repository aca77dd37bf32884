"""One class per kind of subgraph, with the facts about it; `registry.py` has all."""
