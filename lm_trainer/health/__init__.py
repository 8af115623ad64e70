"""Run health: stop signals, alerts, hanging steps, dying processes."""
