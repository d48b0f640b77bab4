"""Echoes one client after the other on 127.0.0.1 with blocking calls only: a client that stalls accept() stalls all.

Usage: echo_server.py PORT
"""

import socket
import sys

listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(("127.0.0.1", int(sys.argv[1])))
listener.listen(16)
while True:
    try:
        client, _ = listener.accept()
        with client:
            while data := client.recv(65536):
                client.sendall(data)
    except ConnectionError:
        pass  # a client that closed early must not end the server
