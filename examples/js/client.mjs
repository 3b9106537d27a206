// A client of a geist-pool in plain JavaScript: a DEALER socket and JSON.
//
//     npm install                        # once, in this folder
//     node client.mjs [ADDRESS]          # the pool named "default" of this machine, if there is no address
//
// docs/protocol.md is what it was written from.

import { randomBytes } from "node:crypto";
import { userInfo } from "node:os";
import { Dealer } from "zeromq";

class PoolError extends Error {
  constructor({ code, message, path, retry_after }) {
    super(path ? `${code}: ${message} (at ${path})` : `${code}: ${message}`);
    Object.assign(this, { code, path, retryAfter: retry_after });
  }
}

export class Pool {
  #socket = new Dealer({ linger: 200, immediate: true, sendTimeout: 5000 });
  #prefix = randomBytes(6).toString("hex");
  #count = 0;
  #waiting = new Map(); // request id -> { resolve, reject, onChunk }
  #sending = Promise.resolve(); // one send at a time, as the socket wants it

  constructor(address) {
    this.#socket.connect(address);
    this.#read();
  }

  async #read() {
    try {
      for await (const [magic, id, body] of this.#socket) {
        const request = magic.toString() === "GP1" && this.#waiting.get(id.toString());
        if (!request) continue;
        const reply = JSON.parse(body.toString());
        if (reply.ok && reply.final === false) {
          request.onChunk(reply.result);
          continue;
        }
        this.#waiting.delete(id.toString());
        if (reply.ok) request.resolve(reply.result);
        else request.reject(new PoolError(reply.error));
      }
    } catch (error) {
      this.#fail(error);
    }
  }

  #fail(error) {
    for (const { reject } of this.#waiting.values()) reject(error);
    this.#waiting.clear();
  }

  /** Asks; any number of requests may be under way. `onChunk` is called with the chunks of a stream. */
  ask(request, onChunk = () => {}) {
    const id = `${this.#prefix}-${++this.#count}`;
    return new Promise((resolve, reject) => {
      this.#waiting.set(id, { resolve, reject, onChunk });
      const frames = ["GP1", id, JSON.stringify(request)];
      this.#sending = this.#sending.then(() => this.#socket.send(frames)).catch((error) => {
        this.#waiting.delete(id);
        reject(error);
      });
    });
  }

  close() {
    this.#fail(new Error("closed"));
    this.#socket.close();
  }
}

function defaultAddress() {
  const runtime = process.env.XDG_RUNTIME_DIR;
  return `ipc://${runtime ? `${runtime}/geist-pool` : `/tmp/geist-pool-${userInfo().uid}`}/default.ipc`;
}

const pool = new Pool(process.argv[2] ?? defaultAddress());
try {
  const info = await pool.ask({ op: "info" });
  console.log(`${info.model}: ${info.workers} workers`);

  const made = await pool.ask({ op: "context.create", name: "road", text: "The road to Amble is long, and it rains." });
  console.log(`context of ${made.context.n_tokens} tokens`);

  let text = "";
  const said = { op: "generate", context: "road", text: " The rider said:", max_tokens: 24, stream: true };
  const answer = await pool.ask(said, (chunk) => (text += chunk.text));
  console.log(answer.text, text === answer.text ? "(streamed)" : "(the chunks do not make up the answer)");

  const labels = [" tired", " glad", " wet through"];
  const choices = await Promise.all(
    ["rider", "horse", "dog"].map((who) => pool.ask({ op: "score", context: "road", text: ` The ${who} is`, labels })),
  );
  console.log(choices.map((choice) => labels[choice.best].trim()).join(", "));
} catch (error) {
  console.error(error.message);
  process.exitCode = 1;
} finally {
  pool.close();
}
