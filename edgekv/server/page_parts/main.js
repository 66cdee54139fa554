"use strict";
const $ = id => document.getElementById(id);
const messages = [];
let model = "", abort = null;

function headers() {
  const key = $("key").value;
  return {"Content-Type": "application/json", ...(key && {Authorization: `Bearer ${key}`})};
}

function say(role, text) {
  const line = document.createElement("div");
  line.className = role;
  line.textContent = text;
  $("talk").append(line);
  line.scrollIntoView();
  return line;
}

function bytes(n) {
  const units = ["B", "KiB", "MiB", "GiB"];
  const i = n ? Math.min(3, Math.floor(Math.log2(n) / 10)) : 0;
  return `${(n / 1024 ** i).toFixed(i ? 1 : 0)} ${units[i]}`;
}

async function watch() {
  try {
    const answer = await fetch("/stats", {headers: headers()});
    $("key").hidden = answer.status !== 401 && !$("key").value;
    if (answer.ok) {
      const stats = await answer.json();
      model = stats.model;
      $("model").textContent = `${stats.model} · ${stats.kv.split(":")[0]}`;
      $("cache").textContent = bytes(stats.edgekv_cache_bytes);
      $("speed").textContent = stats.edgekv_tokens_per_second?.toFixed(1) ?? "–";
      const stated = stats.edgekv_estimated_watts;
      $("watts").textContent = stats.edgekv_watts?.toFixed(2) ?? (stated ? `${stated.toFixed(2)} (stated)` : "–");
    }
  } catch { $("speed").textContent = "–"; }
  setTimeout(watch, 1000);
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

async function ask(text) {
  messages.push({role: "user", content: text});
  say("user", text);
  const line = say("assistant", "");
  abort = new AbortController();
  $("send").hidden = true;
  $("stop").hidden = false;
  let answer = "", began = 0, pieces = 0;
  try {
    const response = await fetch("/v1/chat/completions", {
      method: "POST", headers: headers(), signal: abort.signal,
      body: JSON.stringify({model, messages, stream: true, temperature: 0.7}),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      const piece = event.choices[0]?.delta?.content ?? "";
      if (piece) {
        began ||= performance.now();
        const seconds = (performance.now() - began) / 1000;
        if (pieces++ && seconds) $("speed").textContent = (pieces / seconds).toFixed(1);
      }
      answer += piece;
      line.textContent = answer;
      line.scrollIntoView({block: "end"});
    }
  } catch (error) {
    if (error.name !== "AbortError") say("error", error.message);
  }
  if (answer) messages.push({role: "assistant", content: answer});
  else { messages.pop(); line.remove(); }
  $("send").hidden = false;
  $("stop").hidden = true;
}

$("form").addEventListener("submit", event => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || !$("stop").hidden) return;
  $("text").value = "";
  ask(text);
});
$("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); $("form").requestSubmit(); }
});
$("stop").addEventListener("click", () => abort.abort());
watch();
