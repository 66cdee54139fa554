// The page's state, and the handlers of events.

const NEARLY_FULL = 0.9;
let conversation = newConversation(), settings = readSettings(), abort = null, model = "", ctx = 0;

function openTalk(id) {
  abort?.abort();
  conversation = conversations.get(id) ?? newConversation();
  closeMenu();
  redraw();
  $("text").focus();
}

async function remove(talk) {
  if (!confirm(`Delete “${talk.title}”?`)) return;
  conversations.delete(talk.id);
  talk.removed = true;
  await inStore("readwrite", objects => objects.delete(talk.id));
  if (talk === conversation) openTalk(newestFirst()[0]?.id);
  else redrawList();
}

async function rename(talk) {
  talk.title = prompt("Name of the conversation", talk.title)?.trim() || talk.title;
  await saveConversation(talk, talk.updated);
  redrawList();
}

function editMessage(i, text) {
  if (abort) return;
  conversation.messages.length = i + 1;
  conversation.messages[i].content = text;
  ask();
}

function regenerate() {
  if (abort) return;
  if (conversation.messages.at(-1)?.role === "assistant") conversation.messages.pop();
  if (conversation.messages.length) ask();
}

function redraw(error) {
  show(conversation, error);
  redrawList();
  showContext(error);
}

function redrawList() { showList(newestFirst(), conversation.id); }

async function saveConversation(talk, updated = Date.now()) {
  if (talk.removed) return;
  talk.updated = updated;
  talk.title ||= talk.messages[0]?.content.replace(/\s+/g, " ").slice(0, 60) || "An image";
  conversations.set(talk.id, talk);
  try { await inStore("readwrite", objects => objects.put(talk)); }
  catch { $("status").textContent = "This conversation can't be kept: the browser's storage is full"; }
}

// Requests the next answer, and saves it while it grows, so that it survives closing the page.
async function ask() {
  const talk = conversation, reply = {role: "assistant", content: "", reasoning: ""};
  redraw();
  const grow = startAnswer();
  let error = null, saved = performance.now();
  setBusy(true);
  await saveConversation(talk);
  try {
    const messages = talk.messages.filter(message => !message.dropped).map(asApiMessage);
    if (settings.system) messages.unshift({role: "system", content: settings.system.trim()});
    const body = {model: chosenModel(), messages};
    if (settings.temperature) body.temperature = Number(settings.temperature);
    if (settings["max-tokens"]) body.max_tokens = Number(settings["max-tokens"]);
    for await (const chunk of answer(body, abort.signal)) {
      watchAnswer(chunk, talk);
      const {delta = {}, finish_reason} = chunk.choices[0] ?? {};
      reply.cut ||= finish_reason === "length";
      if (!delta.content && !delta.reasoning_content) continue;
      reply.content += delta.content ?? "";
      reply.reasoning += delta.reasoning_content ?? "";
      if (talk.messages.at(-1) !== reply) talk.messages.push(reply);
      if (talk === conversation) grow(reply);
      if (performance.now() - saved > 1000) { saved = performance.now(); await saveConversation(talk); }
    }
  } catch (failure) {
    if (failure.name !== "AbortError") error = failure;
  }
  setBusy(false);
  await saveConversation(talk);
  if (talk === conversation) redraw(error);
  if (!error) $("status").textContent = reply.cut ? "The answer was cut off at its limit" : "";
}

function setBusy(on) {
  abort = on ? new AbortController() : null;
  $("send").hidden = on;
  $("stop").hidden = !on;
  $("talk").ariaBusy = String(on);
  if (on) $("status").textContent = "Waiting for the model";
  else $("text").focus();
}

// Shows the figures of a growing answer.
function watchAnswer(chunk, talk) {
  const {prompt_progress: reading, timings, usage} = chunk, values = reading ?? timings;
  if (values) {
    const {kv_cache_bytes: packed, kv_cache_f16_bytes: plain} = values;
    $("cache").textContent = formatBytes(packed) + (packed < plain ? ` (f16: ${formatBytes(plain)})` : "");
  }
  if (reading) $("status").textContent = `Reading ${reading.processed} of ${reading.total} tokens`;
  if (timings?.predicted_n) {
    $("status").textContent = `${timings.predicted_n} tokens`;
    $("first").textContent = `${(timings.prompt_ms / 1000).toFixed(2)} s`;
    if (timings.predicted_per_second) $("speed").textContent = timings.predicted_per_second.toFixed(1);
    talk.used = timings.cache_n + timings.prompt_n + timings.predicted_n;
  }
  if (usage) talk.used = usage.total_tokens;
  showUse();
}

function showUse() {
  $("meter").value = ctx ? Math.min(1, conversation.used / ctx) : 0;
  $("used").textContent = ctx ? `${conversation.used} of ${ctx}` : "–";
}

// Shows how full the context is, and the actions if it is nearly full.
function showContext(error) {
  showUse();
  const over = error?.code === "context_length_exceeded", near = ctx && conversation.used > NEARLY_FULL * ctx;
  const alone = questions().length < 2;
  $("full").hidden = !over && !near;
  $("slide").hidden = alone;
  $("fullness").textContent = !over ? "The context is nearly full." : alone
    ? "This message alone is longer than the model's context: edit it, or start anew."
    : "The conversation is longer than the model's context.";
}

// Returns the indices of the questions that are still sent.
function questions() {
  return conversation.messages.flatMap((message, i) => message.role === "user" && !message.dropped ? [i] : []);
}

// Drops the oldest half of the messages, by length, but never the last question.
async function slide() {
  const length = message => message.content.length + 1000 * (message.images?.length ?? 0);
  const {messages} = conversation, included = messages.filter(message => !message.dropped);
  let left = included.reduce((sum, message) => sum + length(message), 0) / 2;
  for (const next of questions().slice(1)) {
    if (left <= 0) break;
    for (const message of messages.slice(0, next))
      if (!message.dropped) { message.dropped = true; left -= length(message); }
  }
  conversation.used = 0;
  await saveConversation(conversation);
  if (messages.at(-1).role === "user") ask();
  else redraw();
}

// Shows whether the model takes images, and its LoRAs.
function showProps(modelName, props) {
  $("attach").hidden = !props?.modalities.vision;
  const loras = props?.loras ?? [];
  $("loras").hidden = !loras.length;
  $("lora").replaceChildren(...[["", modelName], ...loras.map(name => [name, name])].map(([value, text]) => new Option(text, value)));
  $("lora").value = loras.includes(settings.lora) ? settings.lora : "";
}

// Returns the name of the LoRA or the model that requests ask for.
function chosenModel() { return $("lora").value || model; }

async function watch() {
  try {
    const stats = document.hidden ? null : await fetchJson("/stats");
    if (stats) {
      if (!ctx) showProps(stats.model, await fetchJson("/props"));
      ({model, ctx} = stats);
      $("model").textContent = `${chosenModel()} · ${stats.kv.split(":")[0]}`;
      const {edgekv_cache_bytes: cacheBytes, edgekv_tokens_per_second: speed, edgekv_watts: watts} = stats;
      if (!abort && $("cache").textContent === "–") $("cache").textContent = formatBytes(cacheBytes);
      if (!abort && speed && $("speed").textContent === "–") $("speed").textContent = speed.toFixed(1);
      $("power").hidden = watts === undefined;
      $("watts").textContent = `${watts?.toFixed(2)}`;
      showUse();
    }
  } catch { /* the server is gone for now */ }
  setTimeout(watch, 1000);
}

const FIELDS = ["temperature", "max-tokens", "system"];

function settingsChanged() {
  settings = Object.fromEntries([...FIELDS, "lora"].map(id => [id, $(id).checkValidity() ? $(id).value : ""]));
  try { localStorage.setItem("edgekv", JSON.stringify(settings)); } catch { /* kept for this page */ }
}

function closeMenu() {
  $("side").classList.remove("open");
  $("menu").ariaExpanded = "false";
}

const on = (id, event, action) => $(id).addEventListener(event, action);
on("form", "submit", event => {
  event.preventDefault();
  const content = $("text").value.trim();
  if ((!content && !attachedImages.length) || abort) return;
  conversation.messages.push({role: "user", content, images: attachedImages});
  attachedImages = [];
  showAttached();
  $("text").value = "";
  ask();
});
on("text", "keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("form").requestSubmit(); }
});
document.addEventListener("keydown", event => {
  if (event.key !== "Escape" || $("options").open) return;
  if (abort) abort.abort();
  else closeMenu();
});
on("text", "paste", event => {
  if (!$("attach").hidden && event.clipboardData.files.length) { event.preventDefault(); attach(event.clipboardData.files); }
});
for (const kind of ["dragover", "dragleave", "drop"])
  document.addEventListener(kind, event => {
    event.preventDefault();
    $("form").classList.toggle("over", kind === "dragover" && !$("attach").hidden);
    if (kind === "drop" && !$("attach").hidden) attach(event.dataTransfer.files);
  });
on("attach", "click", () => $("file").click());
on("file", "change", async () => { await attach($("file").files); $("file").value = ""; });
on("stop", "click", () => abort?.abort());
for (const id of ["new", "fresh"]) on(id, "click", () => openTalk(null));
on("slide", "click", slide);
on("settings", "click", () => $("options").showModal());
on("options", "change", settingsChanged);
on("menu", "click", () => { $("menu").ariaExpanded = String($("side").classList.toggle("open")); });

(async () => {
  for (const id of FIELDS) $(id).value = settings[id] ?? "";
  await openStore();
  openTalk(newestFirst()[0]?.id);
  watch();
})();
