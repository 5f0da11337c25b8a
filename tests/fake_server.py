"""A chat server in a thread, whose answers a test decides."""

import http.server
import json
import socket
import struct
import threading


def completion(message, finish="stop", tokens=7):
    """As vLLM writes it, with what it has no value for."""
    message = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "function_call": None,
        "reasoning": None,
    } | message
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    return {"id": "chatcmpl-1", "choices": [choice], "usage": {"prompt_tokens": 3, "completion_tokens": tokens}}


class Fake:
    """A server at `url` that notes what it is asked. say(body): a message, a whole answer (a dict with choices), bytes,
    or (status, headers, bytes); None cuts the connection."""

    def __init__(self, say):
        self.say, self.asked, self.lock, self.busy, self.most = say, [], threading.Lock(), 0, 0
        fake = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def do_GET(self):
                self.reply(200, {}, json.dumps({"data": [{"id": "tiny"}]}).encode())

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake.lock:
                    fake.asked.append((self.path, body))
                    fake.busy += 1
                    fake.most = max(fake.most, fake.busy)
                said = fake.say(body)
                with fake.lock:
                    fake.busy -= 1
                if said is None:  # a reset, in the middle of an answer
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.send_response(200)
                    self.send_header("Content-Length", "1000")
                    self.end_headers()
                    return
                if isinstance(said, dict):
                    said = json.dumps(said if "choices" in said else completion(said)).encode()
                self.reply(*(said if isinstance(said, tuple) else (200, {}, said)))

            def reply(self, status, headers, text):
                self.send_response(status)
                for name, value in {"Content-Length": len(text), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(text)

        class Server(http.server.ThreadingHTTPServer):
            request_queue_size = 64  # the kernel drops more, and they come again a second later

        self.http = Server(("127.0.0.1", 0), Handler)
        self.http.handle_error = lambda *args: None
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def bodies(self):
        return [body for _, body in self.asked]
