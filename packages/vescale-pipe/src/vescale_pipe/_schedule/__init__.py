"""Schedules as data: actions, who holds which stage, checking, reading and writing, and the messages in them."""

from .action import Action, Kind, parse_action
from .check import Problem, Rule, problems, validate
from .lower import Op, Program, Step, lower
from .recheck import recheck
from .schedule import Columns, Schedule
from .text import from_csv, from_json, to_csv, to_json

__all__ = [
    "Action",
    "Columns",
    "Kind",
    "Op",
    "Problem",
    "Program",
    "Rule",
    "Schedule",
    "Step",
    "from_csv",
    "from_json",
    "lower",
    "parse_action",
    "problems",
    "recheck",
    "to_csv",
    "to_json",
    "validate",
]
