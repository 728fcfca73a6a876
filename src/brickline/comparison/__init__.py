"""Two recorded runs become a `DivergenceReport`: read, align, triage, judge. Needs no device."""
