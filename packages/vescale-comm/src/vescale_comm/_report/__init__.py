"""What communication costs: models and predictions for worlds of any size, and reports of what happened."""

from .costs import AxisCost, MeshCosts
from .host import HostCosts
from .prediction import Prediction, predict
from .report import CommReport, ReportRow, comm_report

__all__ = ["AxisCost", "CommReport", "HostCosts", "MeshCosts", "Prediction", "ReportRow", "comm_report", "predict"]
