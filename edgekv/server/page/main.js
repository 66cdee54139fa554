// The page's state, and the handlers of events.

const NEARLY_FULL = 0.9;
const FIGURES = ["packed", "plain", "speed", "written", "joules"];
let conversation = newConversation(), abort = null, props = null, isGone = false;

function canSee() { return Boolean(props?.modalities.vision); }

function openTalk(id) {
  abort?.abort();
  conversation = conversations.get(id) ?? newConversation();
  setMenu(false);
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

// Asks a question: a new one, or in the place of an earlier message and all after it.
function say(content, at = conversation.messages.length) {
  if (abort) return;
  const [replaced] = conversation.messages.splice(at);
  conversation.messages.push({role: "user", content, images: replaced?.images ?? attachedImages.splice(0)});
  showAttached();
  ask();
}

function regenerate() {
  if (abort) return;
  if (conversation.messages.at(-1)?.role === "assistant") conversation.messages.pop();
  ask();
}

function redraw(error) {
  show(conversation, error);
  $("model").textContent = props ? loraOf(conversation) || props.model_alias : "edgekv";
  redrawList();
  showContext(error);
}

function redrawList() {
  const words = $("search").value.toLowerCase().split(/\s+/);
  const text = talk => [talk.title, ...talk.messages.map(message => message.content)].join("\n").toLowerCase();
  showList(newestFirst().filter(talk => words.every(word => text(talk).includes(word))), conversation.id);
}

async function saveConversation(talk, updated = Date.now()) {
  if (talk.removed || !talk.messages.length) return;
  talk.updated = updated;
  talk.title ||= talk.messages[0]?.content.replace(/\s+/g, " ").slice(0, 60) || "An image";
  conversations.set(talk.id, talk);
  try { await inStore("readwrite", objects => objects.put(talk)); }
  catch { $("status").textContent = "This conversation can't be kept: the browser's storage is full"; }
}

// Requests the next answer, and saves it while it grows, so that it survives closing the page.
async function ask() {
  const talk = conversation, reply = {role: "assistant", content: "", reasoning: ""};
  setBusy(true);
  const saving = saveConversation(talk);
  redraw();
  const grow = startAnswer();
  let error = null, saved = performance.now();
  await saving;
  try {
    for await (const chunk of answer(requestOf(talk), abort.signal)) {
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
  } catch (failed) {
    if (failed.name === "AbortError") reply.stopped = true;
    else error = failed;
  }
  await saveConversation(talk);
  setBusy(false);
  if (talk === conversation) redraw(error);
  const isCut = reply.cut && !error && $("full").hidden;
  $("status").textContent = isCut ? "The answer was cut off at its limit: ask to go on, or set a longer one in the settings" : "";
}

// Returns the body of the request for the next answer, with the conversation's settings.
function requestOf(talk) {
  const {model, system, response_format: schema, ...numbers} = talk.settings ?? {};
  const messages = talk.messages.filter(message => !message.dropped).map(asApiMessage);
  if (system?.trim()) messages.unshift({role: "system", content: system.trim()});
  const body = {model: loraOf(talk) || props?.model_alias, messages};
  for (const [name, value] of Object.entries(numbers)) if (value) body[name] = Number(value);
  if (schema?.trim()) body.response_format = {type: "json_schema", json_schema: {name: "answer", schema: JSON.parse(schema)}};
  return body;
}

// Returns the LoRA that a conversation is set to; "" for the model itself.
function loraOf(talk) { return props?.loras.includes(talk.settings?.model) ? talk.settings.model : ""; }

function setBusy(on) {
  abort = on ? new AbortController() : null;
  $("send").hidden = on;
  $("stop").hidden = !on;
  $("talk").ariaBusy = String(on);
  if (on) $("status").textContent = "Waiting for the model";
  else $("text").focus();
}

// Takes the figures of a growing answer into its conversation, and shows them.
function watchAnswer(chunk, talk) {
  const {prompt_progress: reading, timings, usage} = chunk, values = reading ?? timings, figures = talk.figures ??= {};
  if (values) Object.assign(figures, {packed: values.kv_cache_bytes, plain: values.kv_cache_f16_bytes});
  if (reading) $("status").textContent = `Reading ${reading.processed} of ${reading.total} tokens`;
  if (timings?.predicted_n) {
    $("status").textContent = `${timings.predicted_n} tokens`;
    figures.speed = timings.predicted_per_second ?? figures.speed;
    talk.used = timings.cache_n + timings.prompt_n + timings.predicted_n;
  }
  if (usage) {
    talk.used = usage.total_tokens;
    figures.written = (figures.written ?? 0) + usage.completion_tokens;
    if (usage.energy_joules) figures.joules = (figures.joules ?? 0) + usage.energy_joules;
  }
  if (talk === conversation) showFigures();
}

function showFigures() {
  const {used, figures: {packed, plain, speed, written, joules} = {}} = conversation, ctx = props?.ctx;
  const texts = {  // of those that are known
    used: ctx && `${Math.min(used, ctx)} of ${ctx} tokens`, speed: speed && `${speed.toFixed(1)} tokens/s`,
    memory: packed && formatBytes(packed) + (packed < plain ? ` instead of ${formatBytes(plain)} in 16 bits` : ""),
    written: written && `${written} tokens`, energy: joules && `${joules.toPrecision(3)} J (${(joules / written).toPrecision(2)} J a token)`,
  };
  for (const [id, text] of Object.entries(texts)) {
    $(id).textContent = text || "";
    $(id).closest("div").hidden = !text;
  }
  $("meter").value = ctx ? Math.min(1, used / ctx) : 0;
}

// Shows how full the context is, and what to do if it is nearly full.
function showContext(error) {
  showFigures();
  const over = error?.code === "context_length_exceeded", isAlone = questions().length < 2;
  $("full").hidden = !over && !(conversation.used > NEARLY_FULL * props?.ctx);
  $("slide").hidden = isAlone;
  $("fullness").textContent = !over ? "The model can keep little more of this conversation in mind." : isAlone
    ? "This message alone is longer than what the model can keep in mind: edit it, or start anew."
    : "The conversation is longer than what the model can keep in mind.";
}

// Returns the indices of the questions that are still sent.
function questions() {
  return conversation.messages.flatMap((message, i) => message.role === "user" && !message.dropped ? [i] : []);
}

// Drops the older half of the questions, with their answers, but never the last question.
async function slide() {
  const sent = questions();
  for (const message of conversation.messages.slice(0, sent[Math.ceil(sent.length / 2)])) message.dropped = true;
  conversation.used = 0;
  await saveConversation(conversation);
  if (conversation.messages.at(-1).role === "user") ask();
  else redraw();
}

// Takes what the server says of its model; empty settings show the model's own.
function takeProps(answered) {
  const {modalities, loras, model_alias: name, default_generation_settings: {params}} = props = answered;
  $("attach").hidden = !modalities.vision;
  $("loras").hidden = !loras.length;
  $("fields").elements.model.replaceChildren(...["", ...loras].map(lora => new Option(lora || name, lora)));
  for (const field of settingFields()) if (params[field.name] != null) field.placeholder = params[field.name];
  if (abort) return;
  if (!document.querySelector(".editor")) redraw();
  $("status").textContent = "";
}

// Asks each second whether the server is there, and at first and after an absence what it serves.
async function watch() {
  const path = props && !isGone ? "/health" : "/props", answered = document.hidden ? null : await request(path).catch(() => undefined);
  if (answered?.ok && path === "/props") takeProps(await answered.json());
  isGone = answered === undefined;
  if (isGone && !abort && !document.querySelector(".error")) $("status").textContent = FAILURES.unreachable;
  setTimeout(watch, 1000);
}

function openSettings() {
  for (const field of settingFields()) field.value = conversation.settings?.[field.name] ?? "";
  $("options").returnValue = "";
  $("options").showModal();
}

// Takes the settings that are valid.
async function takeSettings() {
  const fields = settingFields().filter(field => field.value), valid = fields.filter(field => field.validity.valid);
  conversation.settings = Object.fromEntries(valid.map(({name, value}) => [name, value]));
  if (valid.length < fields.length) $("status").textContent = "What was no valid setting was left out";
  try { if ($("options").returnValue === "keep") localStorage.setItem("edgekv", JSON.stringify(conversation.settings)); } catch { /* private */ }
  await saveConversation(conversation, conversation.updated);
  if (!abort) redraw();
}

function exportAll() {
  const file = new Blob([JSON.stringify({format: FORMAT, conversations: newestFirst()}, null, 1)], {type: "application/json"});
  element("a", {href: URL.createObjectURL(file), download: "edgekv-conversations.json"}).click();
}

// Adds the conversations of a file; of two that are the same one, the later stays.
async function importAll(file) {
  try {
    const talks = checkedExport(await file.text()).filter(talk => !(conversations.get(talk.id)?.updated >= talk.updated));
    await inStore("readwrite", objects => talks.map(talk => objects.put(talk)).at(-1) ?? objects.count());
    for (const talk of talks) conversations.set(talk.id, talk);
    openTalk(newestFirst()[0]?.id);
    $("status").textContent = `Conversations added: ${talks.length}`;
  } catch (error) { $("status").textContent = `${file.name} can't be imported: ${error.message}`; }
}

function setMenu(open) { $("menu").ariaExpanded = String($("side").classList.toggle("open", open)); }

const on = (id, event, action) => $(id).addEventListener(event, action);
on("form", "submit", event => {
  event.preventDefault();
  if (abort || !($("text").value.trim() || attachedImages.length)) return;
  say($("text").value.trim());
  $("text").value = "";
});
on("text", "keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("form").requestSubmit(); }
});
document.addEventListener("keydown", event => {
  if (event.key === "Escape" && !$("options").open) abort ? abort.abort() : setMenu(false);
});
on("text", "paste", event => {
  if (event.clipboardData.files.length) { event.preventDefault(); attach(event.clipboardData.files); }
});
for (const kind of ["dragover", "drop"])
  document.addEventListener(kind, event => { event.preventDefault(); if (kind === "drop") attach(event.dataTransfer.files); });
on("attach", "click", () => $("file").click());
on("file", "change", async () => { await attach($("file").files); $("file").value = ""; });
on("stop", "click", () => abort?.abort());
for (const id of ["new", "fresh"]) on(id, "click", () => openTalk(null));
on("slide", "click", slide);
on("settings", "click", openSettings);
on("options", "close", takeSettings);
on("fields", "input", ({target: {name, value}, target}) => {
  target.setCustomValidity(isSchema(name, value) ? "" : "This is no JSON object: check its quotes, commas and braces");
});
on("clear", "click", () => { for (const field of settingFields()) field.value = ""; });
on("search", "input", redrawList);
on("export", "click", exportAll);
on("import", "click", () => $("import-file").click());
on("import-file", "change", async () => { await importAll($("import-file").files[0]); $("import-file").value = ""; });
on("menu", "click", () => setMenu());

(async () => {
  await openStore();
  openTalk(newestFirst()[0]?.id);
  watch();
})();
