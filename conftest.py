"""Hypothesis profiles and names of cases for every test of the repository; knows no package.

A case has the same name in every process, or workers side by side cannot tell which is which:
what is named by a set, whose order differs between processes, is refused.

`dev` is the default, `ci` is chosen when the environment says CI, HYPOTHESIS_PROFILE overrides
both; `mutants` is `ci` for a run whose failure is to be seen, not explained: it does not shrink.
The `isolated` session lays a copy of this file beside the tests of the wheel it tries.
"""

import os
from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings

settings.register_profile("dev", max_examples=100, deadline=None)
settings.register_profile("ci", max_examples=100, derandomize=True, deadline=None, database=None)
settings.register_profile(
    "mutants", settings.get_profile("ci"), phases=[Phase.explicit, Phase.generate]
)
settings.register_profile("nightly", max_examples=5_000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuses names that depend on the order of a set, of deselected tests too."""
    for item in items:
        cases = getattr(item, "callspec", None)
        for one in _sets_in([] if cases is None else list(cases.params.values())):
            if len(one) > 1 and str(one) in item.nodeid:
                raise pytest.UsageError(
                    f"{item.nodeid}: named by the set {one}, whose order differs between processes;"
                    " give the case an id, or its values as a tuple"
                )


def _sets_in(value: object) -> Iterator[set[object] | frozenset[object]]:
    if isinstance(value, set | frozenset):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _sets_in(one)
