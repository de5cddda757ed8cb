"""`python -m tracewire_engine.launch`: one adapter and its engine, as the supervisor starts them.

A process that the adapter starts for a function of its own, as for checking long sources, runs this file again under
another name. So nothing is imported at the top.
"""

if __name__ == "__main__":
    from tracewire_engine.launch.cli import main
    from tracewire_engine.launch.quick_exit import leave

    leave(main())
