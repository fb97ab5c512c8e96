"""The only place that knows a framework."""
