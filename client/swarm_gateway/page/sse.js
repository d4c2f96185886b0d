// Server-sent events out of a fetch response: EventSource cannot send a key or a body.

const MOST_CHARACTERS = 32 * 1024 * 1024; // of one event; an overview of 1,000 nodes is about 1 MB

/** Yields {event, data} until the stream ends. Comments (pings) are skipped. Throws as `fetch` does. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let event = "message";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      if (rest.length > MOST_CHARACTERS) throw new Error("The gateway sent an event that is too long.");
      // A \r at the end may be the first half of \r\n: it waits for the next piece.
      const lines = rest.split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { event, data: data.join("\n") };
          event = "message";
          data = [];
        } else if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line.startsWith("event:")) event = line.slice(6).trim();
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
