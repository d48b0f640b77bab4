"""Makes short round trips with an echo server for two seconds. Usage: patient_client.py PORT [STATEMENT]

The statement runs before the connection is made.
"""

import socket
import sys
import time

exec(sys.argv[2] if len(sys.argv) > 2 else "")
with socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20) as server:
    for _ in range(40):
        server.sendall(b"x")
        if not server.recv(1):
            raise SystemExit("the server has closed the connection")
        time.sleep(0.05)
print("answered")
