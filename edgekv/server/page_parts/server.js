// What the page asks of the server.

class ServerError extends Error {
  constructor(told) {
    super(told?.message ?? "the server does not answer");
    this.code = told?.code;
  }
}

function headers() {
  const key = $("key").value;
  return {"Content-Type": "application/json", ...(key && {Authorization: `Bearer ${key}`})};
}

async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts)
      if (part.startsWith("data: ") && part !== "data: [DONE]") yield JSON.parse(part.slice(6));
  }
}

// The chunks of an answer. Raises ServerError, and AbortError where the signal is given.
async function* answer(body, signal) {
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: headers(), signal,
    body: JSON.stringify({
      ...body, stream: true, stream_options: {include_usage: true}, return_progress: true, timings_per_token: true,
    }),
  });
  if (!response.ok) throw new ServerError((await response.json().catch(() => null))?.error);
  for await (const event of events(response)) {
    if (event.error) throw new ServerError(event.error);
    yield event;
  }
}

async function facts(path) {
  const response = await fetch(path, {headers: headers()});
  $("keyed").hidden = response.status !== 401 && !$("key").value;
  return response.ok ? response.json() : null;
}

function sent(message) {
  const content = message.images?.length
    ? [...message.images.map(url => ({type: "image_url", image_url: {url}})), {type: "text", text: message.content}]
    : message.content;
  return {role: message.role, content};
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB"];
  const i = n ? Math.min(3, Math.floor(Math.log2(n) / 10)) : 0;
  return `${(n / 1024 ** i).toFixed(i ? 1 : 0)} ${units[i]}`;
}
