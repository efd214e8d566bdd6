"""A fixed sample of torch's own operator samples; `benchmarks/op_coverage.py` runs them all."""

from __future__ import annotations

import pytest

pytest.importorskip("expecttest", reason="torch's operator database needs it")

from vescale_testing.opinfo import FORMS, op_names, run_opinfo

# Hot operators always; of the rest one in so many, so that a change anywhere is likely to meet one.
ALWAYS = """
add sub mul div matmul bmm addmm nn.functional.linear sum mean var softmax log_softmax view reshape transpose
permute expand split cat stack unbind squeeze unsqueeze __getitem__ gather index_select where masked_fill
nn.functional.gelu nn.functional.silu nn.functional.layer_norm nn.functional.rms_norm nn.functional.embedding
nn.functional.cross_entropy nn.functional.scaled_dot_product_attention amax argmax topk sort cumsum norm
""".split()


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_operators_are_right_or_refuse(form: str) -> None:
    known = op_names()
    step = {"function": 15, "out": 25}.get(form, 5)
    names = sorted(set(known[::step]) | ({n for n in known if n in ALWAYS} if form == "function" else set()))
    rows = run_opinfo(names, samples=3, form=form, coverage=False)
    bad = [f"{r.name}: {r.status} {r.messages}" for r in rows if r.status in ("wrong", "failed")]
    assert not bad, "\n".join(bad)
    ran = [r for r in rows if r.status != "skipped"]
    assert len(ran) >= 10
    assert sum(r.status == "passed" for r in ran) >= 0.9 * len(ran)
