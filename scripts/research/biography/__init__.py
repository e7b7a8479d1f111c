"""The controlled benchmark: facts about synthetic people, learned one task after another."""
