"""One request to the engines, from token ids to token ids: the client, its pool of engines, what a call asks for, the
wire."""
