//! What a router is plugged into.
