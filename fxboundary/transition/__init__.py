"""One change of layout: its steps, its gradient, its cost, its execution. No graphs here."""
