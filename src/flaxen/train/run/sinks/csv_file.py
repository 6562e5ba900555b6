"""The log as a table: log.csv."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterable

from flaxen.train.run.log import Row
from flaxen.train.run.sinks.sink import Sink, Told


class CsvFile(Sink):
    """One line for each row of the log; a number that a row lacks is an empty cell. It is made of
    the log, anew whenever there is a column more.
    """

    def __init__(self, told: Told):
        self.log, self.path = told.log, told.log.path.with_suffix(".csv")
        self.columns: list[str] = []
        self._write_all()

    def row(self, row: Row) -> None:
        if set(row) <= set(self.columns):
            with self.path.open("a", encoding="utf-8", newline="") as file:
                csv.DictWriter(file, self.columns).writerow(row)
        else:
            self._write_all()

    def close(self, failed: bool) -> None:
        self._write_all()

    def _write_all(self) -> None:
        rows = self.log.rows()
        self.columns = _columns(rows)
        aside = self.path.with_suffix(".csv.partial")
        with aside.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)
        os.replace(aside, self.path)


def _columns(rows: Iterable[Row]) -> list[str]:
    """Every key, in the order of its first row."""
    return list(dict.fromkeys(key for row in rows for key in row))
