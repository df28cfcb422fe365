# SPDX-License-Identifier: Apache-2.0
"""What the engine tells its user: counters, the run log, and the memory and disk of the machine."""

from patrickstar.report.run_log import RunLog
from patrickstar.report.stats import Stats

__all__ = ["RunLog", "Stats"]
