"""Python code of Dynamo's graph that nobody calls: it is not generated.

When a frame's trace is complete, Dynamo makes a module of its graph only to write assertions into the graph, and then
the module that it gives to the backend, which generates code if it is called. The former would generate code at once,
half a second for 14,000 nodes.
"""

from __future__ import annotations

from typing import Any

from fxpasses.dynamo.interceptions import NOT_HANDLED, Handlers, Proceed, method
from fxpasses.dynamo.trace import Trace
from fxpasses.graph.copying import is_lazy

handlers = Handlers()


@handlers.at(
    method("torch.fx.graph_module.GraphModule", "recompile"),
    without="code is generated for each graph that Dynamo completes, which takes time",
)
def recompile(trace: Trace, proceed: Proceed, self: Any) -> Any:
    if trace.graph is None or self.graph is not trace.graph.output.graph or is_lazy(self):
        return NOT_HANDLED
    return None
