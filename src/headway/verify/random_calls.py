"""Names of the torch functions that draw random numbers, grouped by distribution."""

# Bernoulli draws are missing in the groups, because `SharedDraws` makes them from uniform ones.
UNIFORM = ("rand", "rand_like", "uniform_")
NORMAL = ("randn", "randn_like", "normal_")
INTEGER = ("randint", "randint_like", "random_")
OTHERS = ("multinomial", "randperm", "exponential_", "log_normal_", "geometric_", "cauchy_", "poisson", "normal")
"""Functions whose draws cannot be made for the global batch."""
RANDOM_CALLS = frozenset((*UNIFORM, *NORMAL, *INTEGER, *OTHERS, "bernoulli", "bernoulli_"))
"""Names of all torch functions that draw random numbers."""
