"""How a cohort's local steps are run. Every engine gives the reference loop's result."""
