"""What happens over time: events, critical path, terminal views, Perfetto files, a viewer."""
