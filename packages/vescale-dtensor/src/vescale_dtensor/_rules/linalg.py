"""Linear algebra: whole matrices, sharded batches of them.

Decompositions, solvers and functions of matrices treat every matrix of a batch by itself. What is
linear in one of its operands keeps a pending sum there pending.
"""

from __future__ import annotations

from typing import Any

from .._dispatch.call import Call, LocalFunction, Rule, Shape
from .._dispatch.table import keyed
from .._spec import Spec
from ._batched import Cores, batched


def _system(call: Call) -> tuple[int, int] | None:
    """Dims of `A` and `B` of a linear system, whose right side may be a vector."""
    if len(call.specs) != 2:
        return None
    left, right = call.specs
    vector = right.ndim == 1 or (right.ndim == left.ndim - 1 and right.shape == left.shape[:-1])
    return 2, 1 if vector else 2


def _least_squares(call: Call) -> tuple[int, int] | None:
    """The same for `lstsq`; these drivers return residuals or not, depending on the ranks of all matrices."""
    driver = call.arg(3, "driver")
    return None if driver in ("gelss", "gelsd") else _system(call)


def _least_squares_shapes(call: Call) -> list[Shape]:
    """Solution, residuals, ranks and singular values, of which the default driver leaves out two."""
    (_, right), (rows, columns) = _system(call) or (2, 2), call.shape[-2:]
    batch = call.shape[:-2]
    end = call.specs[1].shape[-1:] if right == 2 else ()
    if call.arg(3, "driver") == "gels":
        return [(*batch, columns, *end), (*batch, *end) if rows > columns else (0,), (0,), (0,)]
    return [(*batch, columns, *end), (0,), tuple(batch), (0,)]


_solve = batched(_system, linear=1)


def solve_rule(call: Call) -> Rule | None:
    """`linalg.solve` and `solve_ex`: a matrix that serves all systems is told from one vector per system.

    torch tells them by the shapes, and a part may have as many systems as a matrix has rows.
    """
    rule = _solve(call)
    if rule is None or call.specs[1].ndim != call.ndim - 1 or _system(call) == (2, 1) or len(call.args) < 2:
        return rule
    inner = rule.localize

    def localize(ins: list[Spec], outs: list[Spec]) -> LocalFunction:
        found: Any = inner(ins, outs) if inner is not None else None

        def local(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            args = (args[0], args[1].unsqueeze(0), *args[2:])
            return func(*args, **kwargs) if found is None else found(func, args, kwargs)

        return local

    rule.localize = localize
    return rule


def _reflectors_shapes(call: Call) -> list[Shape]:
    """Shapes of what `geqrf` gives, which torch cannot run on meta."""
    return [tuple(call.shape), (*call.shape[:-2], min(call.shape[-2:]))]


_FUNCTIONS: list[tuple[str, Cores, int | None]] = [
    ("linalg.cholesky linalg.cholesky_ex cholesky cholesky_inverse", (2,), None),
    ("linalg.inv linalg.inv_ex linalg.det linalg.slogdet inverse det logdet slogdet", (2,), None),
    ("linalg.eig linalg.eigvals linalg.eigh linalg.eigvalsh", (2,), None),
    ("linalg.svd linalg.svdvals svd linalg.qr qr", (2,), None),
    ("linalg.lu linalg.lu_factor linalg.lu_factor_ex _lu_with_info", (2,), None),
    ("linalg.ldl_factor linalg.ldl_factor_ex", (2,), None),
    ("linalg.matrix_exp matrix_exp linalg.matrix_power matrix_power linalg.cond", (2,), None),
    ("linalg.pinv pinverse linalg.matrix_rank", (2, 0, 0), None),
    ("linalg.vander", (1,), None),
    ("linalg.solve_triangular", (2, 2), 1),
    ("triangular_solve", (2, 2), None),
    ("cholesky_solve", (2, 2), 0),
    ("linalg.lu_solve linalg.ldl_solve", (2, 1, 2), 2),
    ("lu_solve", (2, 2, 1), 0),
    ("lu_unpack linalg.householder_product orgqr", (2, 1), None),
    ("ormqr", (2, 1, 2), 2),
]
"""Names, dims of the items of each operand, and the operand in which the function is linear."""

for _names, _cores, _linear in _FUNCTIONS:
    keyed(_names, batched(_cores, linear=_linear), inplace=False)
keyed("linalg.solve linalg.solve_ex", solve_rule, inplace=False)
keyed("geqrf", batched((2,), shapes=_reflectors_shapes), inplace=False)
keyed("linalg.lstsq", batched(_least_squares, shapes=_least_squares_shapes), inplace=False)
