"""See what the passes did: record the reports of the graphs that are compiled."""

from fxpasses.inspect.record import GraphRecord, Record, note_graph, record

__all__ = ["GraphRecord", "Record", "note_graph", "record"]
