"""Hypothesis profiles for every test of the repository; knows no package.

`dev` is the default, `ci` is chosen when the environment says CI, HYPOTHESIS_PROFILE overrides
both; `mutants` is `ci` for a run whose failure is to be seen, not explained: it does not shrink.
The `isolated` session lays a copy of this file beside the tests of the wheel it tries.
"""

import os

from hypothesis import Phase, settings

settings.register_profile("dev", max_examples=100, deadline=None)
settings.register_profile("ci", max_examples=100, derandomize=True, deadline=None, database=None)
settings.register_profile(
    "mutants", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate]
)
settings.register_profile("nightly", max_examples=5_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))
