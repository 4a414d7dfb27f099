"""How AITER is found: by its distribution, its functions by name and signature.

The stand-in is changed as another version or a wrong package would differ, and the error must say
what is missing, and where.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from syncline.model_ops_rocm import BackendUnavailableError, available, prepare, select
from syncline.model_ops_rocm.aiter import BACKEND
from syncline.model_ops_rocm.aiter.detect import Aiter, detect
from syncline.model_ops_rocm.aiter.distribution import release_of, why_not_installed
from syncline.model_ops_rocm.aiter.enums import ENUMS, ActivationType, QuantType
from syncline.model_ops_rocm.aiter.interface import (
    KNOWN_FAULTS,
    NO_FUNCTION,
    OP_ENUMERATIONS,
    OP_FUNCTIONS,
    RECORD,
    KnownFault,
)
from syncline.model_ops_rocm.aiter.ops.attention import AiterPagedAttention
from syncline.model_ops_rocm.aiter.ops.dense import (
    AiterRMSNorm,
    AiterRotaryEmbedding,
    AiterSiluAndMul,
)
from syncline.model_ops_rocm.aiter.ops.families import implementations
from syncline.model_ops_rocm.aiter.ops.kv import AiterKVWrite
from syncline.model_ops_rocm.aiter.ops.linear import AiterLinear, AiterLinearQuantised
from syncline.model_ops_rocm.aiter.ops.moe import AiterMoeExperts, AiterMoeRoute
from syncline.model_ops_rocm.aiter.ops.quantise import AiterQuantiseActivation, AiterRMSNormQuant
from syncline.model_ops_rocm.backends import Missing
from syncline.model_ops_rocm.contracts import (
    KVWrite,
    Linear,
    LinearQuantised,
    MoeExperts,
    MoeRoute,
    PagedAttention,
    QuantiseActivation,
    RMSNorm,
    RMSNormQuant,
    RotaryEmbedding,
    SiluAndMul,
)
from syncline.model_ops_rocm.kv import KVLayout, KVOrder
from syncline.model_ops_rocm.registry import OPS
from syncline.model_ops_rocm.testing.fake_aiter import FakeAiter, write_distribution

InstallAiter = Callable[..., FakeAiter]


def found(version: str = "0.1.22") -> Aiter:
    return detect(version, device_type="cpu", arch=lambda device: "gfx942")


def why(op: str, arch: str = "gfx942") -> str | None:
    (line,) = available(op=op, backend="aiter", arch=arch, dtype=torch.bfloat16)
    return line.why_not


def test_the_stand_in_is_as_recorded(install_aiter: InstallAiter) -> None:
    install_aiter()
    aiter = found()
    assert aiter.problems == {}
    assert aiter.functions.keys() == RECORD.keys()
    assert {name for names in OP_FUNCTIONS.values() for name in names} == RECORD.keys()


def test_every_op_is_there_or_says_why_not(install_aiter: InstallAiter) -> None:
    install_aiter()
    for op in OPS:
        assert (why(op) is None) == (op in OP_FUNCTIONS)
        elsewhere = "it runs on gfx942, gfx950, not on sm_90"
        assert why(op, "sm_90") == (BACKEND.why_absent(op) or elsewhere)
    assert why("embedding") == NO_FUNCTION


def test_nothing_is_imported_to_list_what_there_is(install_aiter: InstallAiter) -> None:
    fake = install_aiter()
    del sys.modules["aiter"]
    available(backend="aiter")
    assert "aiter" not in sys.modules
    assert fake.calls == []


def test_select_gives_ops_that_take_no_tensor_of_the_cpu(install_aiter: InstallAiter) -> None:
    fake = install_aiter()
    norm = select("rms_norm", backend="aiter", arch="gfx942", dtype=torch.bfloat16)
    x = torch.ones(2, 8).bfloat16()
    with pytest.raises(ValueError, match=r"rms_norm: x must be on cuda for AITER, got cpu"):
        norm(x, x[0], 1e-6)
    assert fake.calls == []


def test_a_function_that_is_missing_is_named_with_the_version(install_aiter: InstallAiter) -> None:
    fake = install_aiter(version="0.1.23")
    del fake.module("aiter")["rmsnorm2d_fwd"]
    with pytest.raises(BackendUnavailableError) as caught:
        select("rms_norm", backend="aiter", arch="gfx942", dtype=torch.bfloat16)
    assert caught.value.why == "amd-aiter 0.1.23: it has no aiter.rmsnorm2d_fwd"
    assert caught.value.package == "amd-aiter"
    # The other ops are there, and the list now says what this one lacks.
    select("silu_and_mul", backend="aiter", arch="gfx942", dtype=torch.bfloat16)
    assert why("rms_norm") == caught.value.why
    assert why("silu_and_mul") is None
    with pytest.raises(BackendUnavailableError, match=r"no aiter.rmsnorm2d_fwd"):
        prepare("rms_norm", [], backend="aiter", arch="gfx942", dtype=torch.bfloat16)


def test_an_object_that_is_missing_is_looked_for_in_each_place(install_aiter: InstallAiter) -> None:
    fake = install_aiter()
    del fake.module("aiter.tuned_gemm")["tgemm"]
    problem = found().problems["tgemm.mm"]
    assert problem == "amd-aiter 0.1.22: it has no aiter.tgemm.mm or aiter.tuned_gemm.tgemm.mm"


def no_parameter(x: object, w: object, eps: object) -> None: ...
def another_order(w: object, x: object, eps: object, use_model_sensitive_rmsnorm: int) -> None: ...
def too_few(x: object, *, use_model_sensitive_rmsnorm: int) -> None: ...
def one_more(
    x: object, w: object, eps: object, stream: object, use_model_sensitive_rmsnorm: int = 0
) -> None: ...
def too_early(x: object, w: object, use_model_sensitive_rmsnorm: int, eps: object = 1) -> None: ...
def unnamed(*args: object, **kwargs: object) -> None: ...


CHANGED: Mapping[str, tuple[object, str]] = {
    "no parameter": (no_parameter, "has no parameter use_model_sensitive_rmsnorm"),
    "another order": (another_order, "has parameter x at 1, on record at 0"),
    "too few": (too_few, "takes 1 arguments by position, on record 3"),
    "one more": (one_more, "demands a parameter stream that is not on record"),
    "too early": (too_early, "has parameter eps at 3, on record at 2"),
    "unnamed": (unnamed, "has a signature that names no parameters"),
    "no signature": (type, "has no signature to compare"),
    "no function": (3, "is no function"),
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_signature_that_is_another_is_named(install_aiter: InstallAiter, change: str) -> None:
    fake = install_aiter()
    function, text = CHANGED[change]
    fake.module("aiter")["rmsnorm2d_fwd"] = function
    assert found().problems == {
        "rmsnorm2d_fwd": f"amd-aiter 0.1.22: aiter.rmsnorm2d_fwd {text}",
    }


def test_more_parameters_with_defaults_are_no_change(install_aiter: InstallAiter) -> None:
    def later(
        input: object, weight: object, epsilon: float, use_model_sensitive_rmsnorm: int = 0,
        padding: int = 0,
    ) -> None: ...  # fmt: skip

    fake = install_aiter()
    fake.module("aiter")["rmsnorm2d_fwd"] = later
    assert found().problems == {}


def test_an_old_version_is_refused_before_it_is_imported(install_aiter: InstallAiter) -> None:
    fake = install_aiter(version="0.1.7.post2.dev18")
    del sys.modules["aiter"]
    assert why("linear") == "amd-aiter 0.1.7.post2.dev18 is installed, older than 0.1.21"
    with pytest.raises(BackendUnavailableError, match=r"0\.1\.7\.post2\.dev18 is installed"):
        select("linear", backend="aiter", arch="gfx942", dtype=torch.bfloat16)
    assert "aiter" not in sys.modules
    assert fake.calls == []


@pytest.mark.parametrize(
    ("version", "release"),
    [
        ("0.1.22+rocm7.2", (0, 1, 22)),
        ("0.1.21.post3.dev40+ge4048607a", (0, 1, 21)),
        ("1.0rc1", (1, 0)),
        ("unknown", ()),
    ],
)
def test_a_version_is_read_as_its_release(version: str, release: tuple[int, ...]) -> None:
    assert release_of(version) == release


def test_a_build_without_a_tag_is_judged_by_its_functions(install_aiter: InstallAiter) -> None:
    install_aiter(version="0.1.0")
    assert why_not_installed() is None


def test_both_packages_of_the_name_are_refused(install_aiter: InstallAiter, tmp_path: Path) -> None:
    install_aiter()
    write_distribution(tmp_path, "aiter", "0.13.20191203")
    assert why("linear") == (
        "distribution aiter 0.13.20191203 is an unrelated library"
        " that shares the import name of amd-aiter 0.1.22+rocm7.2: uninstall it"
    )


def test_an_error_inside_the_import_is_named(
    install_aiter: InstallAiter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_aiter()
    monkeypatch.delitem(sys.modules, "aiter")
    (tmp_path / "aiter.py").write_text("import jax_that_is_not_there\n")
    with pytest.raises(BackendUnavailableError) as caught:
        select("linear", backend="aiter", arch="gfx950", dtype=torch.bfloat16)
    assert caught.value.why.startswith("import aiter raised ModuleNotFoundError: No module named")
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


def test_enumerations_cross_by_value(install_aiter: InstallAiter) -> None:
    fake = install_aiter()
    aiter = found()
    for ours, name in ENUMS.items():
        theirs = fake.module("aiter")[name]
        for member in ours:
            crossed = aiter.member(member)
            assert crossed != member
            assert getattr(crossed, "value", None) == int(member)
            assert crossed in getattr(theirs, "__members__", {}).values()


def test_a_member_that_is_missing_is_named(install_aiter: InstallAiter) -> None:
    fake = install_aiter()
    members = getattr(fake.module("aiter")["QuantType"], "__members__", {})
    del members["per_1x128"]
    del fake.module("aiter")["ActivationType"]
    aiter = found()
    with pytest.raises(BackendUnavailableError, match=r"aiter.QuantType has no member PER_1X128"):
        aiter.member(QuantType.PER_1X128)
    assert aiter.member(QuantType.PER_TOKEN) is members["per_Token"]
    with pytest.raises(BackendUnavailableError, match=r"ActivationType has no member SILU = 0"):
        aiter.member(ActivationType.SILU)
    # The ops that pass such a member are not there; the others are.
    missing = {op for op, one in implementations(aiter).items() if isinstance(one, Missing)}
    assert missing == OP_ENUMERATIONS.keys()


def test_an_op_with_several_functions_is_there_for_what_one_of_them_does(
    install_aiter: InstallAiter,
) -> None:
    fake = install_aiter()
    del fake.module("aiter")["reshape_and_cache_flash"]
    write = implementations(found())["kv_write"]
    assert isinstance(write, AiterKVWrite)
    layout = KVLayout(order=KVOrder.NHD, dtype=torch.bfloat16, kernel_block_size=16)
    cache, token = torch.zeros(2, 16, 1, 8).bfloat16(), torch.ones(1, 1, 8).bfloat16()
    with pytest.raises(BackendUnavailableError, match=r"no aiter.reshape_and_cache_flash"):
        write(token, token, cache, cache.clone(), torch.zeros(1).long(), layout=layout)
    del fake.module("aiter")["reshape_and_cache"]
    neither = implementations(found())["kv_write"]
    assert isinstance(neither, Missing)
    assert neither.why == (
        "amd-aiter 0.1.22: it has no aiter.reshape_and_cache;"
        " amd-aiter 0.1.22: it has no aiter.reshape_and_cache_flash"
    )


def test_a_fault_is_gone_from_the_release_that_is_known_to_be_right() -> None:
    fault = KnownFault(function="f", case="a case", fixed_in=(0, 1, 25))
    assert fault.is_in("0.1.24.post1")
    assert not fault.is_in("0.1.25.dev3")
    assert not fault.is_in("0.2")
    assert fault.is_in("unknown")
    assert all(one.is_in("99.0") for one in KNOWN_FAULTS)


def test_the_document_has_every_op_and_function() -> None:
    page = Path(__file__).parents[3] / "docs" / "aiter.md"
    if not page.exists():
        pytest.skip("docs/aiter.md is not beside the package: the tests run from a wheel")
    # A row without an op goes on with the op before.
    rows: dict[str, str] = {}
    op = ""
    for line in page.read_text().splitlines():
        if line.startswith("|"):
            _, name, *cells = line.split("|")
            op = name.strip() or op
            rows[op] = rows.get(op, "") + "|".join(cells)
    for op, names in OP_FUNCTIONS.items():
        assert all(f"`{name}(" in rows[f"`{op}`"] for name in names), op
    # Of the rest, the page names those that are absent for another reason than a missing function.
    told = {op: BACKEND.why_absent(op) for op in OPS}
    assert all(
        why in (None, NO_FUNCTION) or f"`{op}`" in " ".join(rows) for op, why in told.items()
    )
    for fault in KNOWN_FAULTS:
        assert fault.case in rows[f"`{fault.function}`"]


def test_each_op_has_the_form_of_its_contract(install_aiter: InstallAiter) -> None:
    """What mypy checks here: every parameter of the contract is taken, by its name."""
    install_aiter()
    aiter = found()
    norm: RMSNorm = AiterRMSNorm(aiter)
    rotary: RotaryEmbedding = AiterRotaryEmbedding(aiter)
    activation: SiluAndMul = AiterSiluAndMul(aiter)
    linear: Linear = AiterLinear(aiter)
    product: LinearQuantised = AiterLinearQuantised(aiter)
    quantise: QuantiseActivation = AiterQuantiseActivation(aiter)
    norm_quant: RMSNormQuant = AiterRMSNormQuant(aiter)
    write: KVWrite = AiterKVWrite(aiter)
    attend: PagedAttention = AiterPagedAttention(aiter)
    route: MoeRoute = AiterMoeRoute(aiter)
    experts: MoeExperts = AiterMoeExperts(aiter)
    ops = (norm, rotary, activation, linear, product, quantise, norm_quant)
    ops_of_tokens = (write, attend, route, experts)
    classes = {type(op).__name__ for op in (*ops, *ops_of_tokens)}
    assert classes == {type(op).__name__ for op in implementations(aiter).values()}
