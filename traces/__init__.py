"""What happens over time: events, the terminal view and the Perfetto export."""
