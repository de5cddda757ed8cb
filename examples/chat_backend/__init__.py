"""A chat service on Tracewire: answers that outlive their connections, and bend while they are written."""
