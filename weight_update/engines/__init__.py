"""What engines are told: one small client an engine, one method an endpoint."""
