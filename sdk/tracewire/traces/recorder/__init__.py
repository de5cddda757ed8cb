"""The flight recorder: a trace in one file, shown without an engine, and run again on one."""
