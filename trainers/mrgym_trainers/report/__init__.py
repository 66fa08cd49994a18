"""The HTML report of a run: one self-contained file a run folder."""

from mrgym.errors import MissingExtraError

try:
    from mrgym_trainers.report.read import Evaluation, Run, Sample, Series, Summary, read_run
    from mrgym_trainers.report.render import write_report
except ModuleNotFoundError as error:
    if error.name in {"jinja2", "markupsafe", "matplotlib", "yaml"}:
        raise MissingExtraError(error.name, "train") from error
    raise

__all__ = ["Evaluation", "Run", "Sample", "Series", "Summary", "read_run", "write_report"]
