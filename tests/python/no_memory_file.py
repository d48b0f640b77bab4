"""A client that may not create files connects repeatedly, and its server sees only connections that work.

The client cannot create the memory of a lane, so it uses kernel TCP. If it had announced a lane to the server before,
the server would accept a connection that is reset. Prints "ok".
"""

import os
import resource
import socket

CONNECTIONS = 200
server = socket.create_server(("127.0.0.1", 0), backlog=16)
client_process = os.fork()
if client_process == 0:
    address = server.getsockname()
    server.close()
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    for _ in range(CONNECTIONS):
        with socket.create_connection(address, timeout=20) as client:
            client.sendall(b"ping")
            if client.recv(10) != b"ping":
                os._exit(1)
    os._exit(0)

for _ in range(CONNECTIONS):
    connection = server.accept()[0]
    connection.sendall(connection.recv(10))
    connection.close()
_, status = os.waitpid(client_process, 0)
if status != 0:
    raise SystemExit(f"the client ended with status {status}")
print("ok")
