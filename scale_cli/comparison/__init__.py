"""Several finished runs side by side: what each bought, what it cost, and what none of the others beats."""
