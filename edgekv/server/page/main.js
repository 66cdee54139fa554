// The page's state, and what happens when somebody does something.

const NEARLY_FULL = 0.9;
let store, conversation = newConversation(), settings = readSettings(), abort = null, model = "", ctx = 0;

const act = {
  open(id) {
    if (abort) abort.abort();
    conversation = store.kept.get(id) ?? newConversation();
    closeMenu();
    redraw();
    $("text").focus();
  },
  async remove(id) {
    await store.remove(id);
    if (id === conversation.id) act.open(store.all()[0]?.id);
    else redrawList();
  },
  async renamed(id, title) {
    const renamed = store.kept.get(id);
    if (renamed && title) { renamed.title = title; await store.put(renamed); }
    redrawList();
  },
  edited(i, text) {
    if (abort) return;
    conversation.messages.length = i + 1;
    conversation.messages[i].content = text;
    ask();
  },
  regenerate() {
    if (abort) return;
    if (conversation.messages.at(-1)?.role === "assistant") conversation.messages.pop();
    if (conversation.messages.length) ask();
  },
  redraw: () => redraw(),
};
const view = new View(act);

function redraw(error) {
  view.show(conversation, error);
  redrawList();
  showContext(error);
}

function redrawList() { view.list(store.all(), conversation.id); }

function fresh() { act.open(null); }

async function keep(talk) {
  talk.updated = Date.now();
  talk.title ||= talk.messages[0]?.content.replace(/\s+/g, " ").slice(0, 60) || "An image";
  try { await store.put(talk); }
  catch { $("status").textContent = "This conversation can't be kept: the browser's storage is full"; }
}

function say(text) {
  conversation.messages.push({role: "user", content: text, images: takeAttached()});
  ask();
}

// Asks for the answer to what has been said; it is kept as it grows, so that it survives a page that is closed.
async function ask() {
  const asked = conversation, answered = {role: "assistant", content: "", reasoning: ""};
  redraw();
  const grow = view.growing();
  let error = null, saved = performance.now();
  busy(true);
  await keep(asked);
  try {
    const messages = asked.messages.filter(message => !message.dropped).map(sent);
    if (settings.system) messages.unshift({role: "system", content: settings.system});
    const body = {model: chosen(), messages};
    if (settings.temperature !== null) body.temperature = settings.temperature;
    if (settings.maxTokens) body.max_tokens = settings.maxTokens;
    for await (const chunk of answer(body, abort.signal)) {
      watchAnswer(chunk, asked);
      const {delta = {}, finish_reason} = chunk.choices[0] ?? {};
      answered.cut ||= finish_reason === "length";
      if (!delta.content && !delta.reasoning_content) continue;
      answered.content += delta.content ?? "";
      answered.reasoning += delta.reasoning_content ?? "";
      if (asked.messages.at(-1) !== answered) asked.messages.push(answered);
      if (asked === conversation) grow(answered);
      if (performance.now() - saved > 1000) { saved = performance.now(); await keep(asked); }
    }
  } catch (failure) {
    if (failure.name !== "AbortError") error = failure;
  }
  busy(false);
  await keep(asked);
  if (asked === conversation) redraw(error);
  if (!error) $("status").textContent = answered.cut ? "The answer was cut off at its limit" : "";
}

function busy(on) {
  abort = on ? new AbortController() : null;
  $("send").hidden = on;
  $("stop").hidden = !on;
  $("talk").ariaBusy = String(on);
  if (on) $("status").textContent = "Waiting for the model";
  else $("text").focus();
}

// Figures of the answer that is coming.
function watchAnswer(chunk, asked) {
  const {prompt_progress: reading, timings, usage} = chunk, held = reading ?? timings;
  if (held) {
    const {kv_cache_bytes: packed, kv_cache_f16_bytes: plain} = held;
    $("cache").textContent = bytes(packed) + (packed < plain ? ` (f16: ${bytes(plain)})` : "");
  }
  if (reading) $("status").textContent = `Reading ${reading.processed} of ${reading.total} tokens`;
  if (timings?.predicted_n) {
    $("status").textContent = `${timings.predicted_n} tokens`;
    $("first").textContent = `${(timings.prompt_ms / 1000).toFixed(2)} s`;
    if (timings.predicted_per_second) $("speed").textContent = timings.predicted_per_second.toFixed(1);
    asked.used = timings.cache_n + timings.prompt_n + timings.predicted_n;
  }
  if (usage) asked.used = usage.total_tokens;
  if (asked === conversation) showUse();
}

function showUse() {
  $("meter").value = ctx ? Math.min(1, conversation.used / ctx) : 0;
  $("used").textContent = ctx ? `${conversation.used} of ${ctx}` : "–";
}

// How full the context is; where little is left, or too little, what can be done.
function showContext(error) {
  showUse();
  const over = error?.code === "context_length_exceeded", near = ctx && conversation.used > NEARLY_FULL * ctx;
  $("full").hidden = !over && !near;
  $("fullness").textContent = over ? "The conversation is longer than the model's context." : "The context is nearly full.";
  $("slide").hidden = turns().length < 2;
  if (over && turns().length < 2) $("fullness").textContent = "This message alone is longer than the model's context: edit it, or start anew.";
}

// Places of the questions that are still sent.
function turns() {
  return conversation.messages.flatMap((message, i) => message.role === "user" && !message.dropped ? [i] : []);
}

// Leaves out the oldest half of what is sent, by its length; the last question stays.
async function slide() {
  const length = message => message.content.length + 1000 * (message.images?.length ?? 0);
  const kept = conversation.messages.filter(message => !message.dropped);
  const half = kept.reduce((sum, message) => sum + length(message), 0) / 2;
  let dropped = 0;
  for (const [from, to] of turns().map((from, i, all) => [from, all[i + 1]])) {
    if (to === undefined || dropped >= half) break;
    for (const message of conversation.messages.slice(0, to))
      if (!message.dropped) { message.dropped = true; dropped += length(message); }
  }
  conversation.used = 0;
  await keep(conversation);
  if (conversation.messages.at(-1).role === "user") ask();
  else redraw();
}

// Whether it sees, and the LoRAs that it can be asked with.
function showProps(own, props) {
  $("attach").hidden = !props?.modalities.vision;
  const loras = props?.loras ?? [];
  $("loras").hidden = !loras.length;
  $("lora").replaceChildren(...[["", own], ...loras.map(name => [name, name])].map(([value, text]) => new Option(text, value)));
  $("lora").value = loras.includes(settings.lora) ? settings.lora : "";
}

// The name that answers are asked for by.
function chosen() { return $("lora").value || model; }

async function watch() {
  try {
    const stats = document.hidden ? null : await facts("/stats");
    if (stats) {
      if (!ctx) showProps(stats.model, await facts("/props"));
      ({model, ctx} = stats);
      $("model").textContent = `${chosen()} · ${stats.kv.split(":")[0]}`;
      if (!abort && $("cache").textContent === "–") $("cache").textContent = bytes(stats.edgekv_cache_bytes);
      if (!abort && stats.edgekv_tokens_per_second && $("speed").textContent === "–")
        $("speed").textContent = stats.edgekv_tokens_per_second.toFixed(1);
      const stated = stats.edgekv_estimated_watts, watts = stats.edgekv_watts ?? stated;
      $("power").hidden = watts === undefined;
      if (watts !== undefined) $("watts").textContent = watts.toFixed(2) + (stats.edgekv_watts === undefined ? " (stated)" : "");
      showUse();
    }
  } catch { /* the server is gone for now */ }
  setTimeout(watch, 1000);
}

function exported() {
  const told = {title: conversation.title, model, messages: conversation.messages.map(({role, content, images}) => ({role, content, images}))};
  const url = URL.createObjectURL(new Blob([JSON.stringify(told, null, 2)], {type: "application/json"}));
  element("a", {href: url, download: `${(conversation.title || "conversation").replace(/[^\w-]+/g, "-").slice(0, 40)}.json`}).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

function applySettings() {
  document.documentElement.dataset.theme = settings.theme;
  $("temperature").value = settings.temperature ?? "";
  $("max-tokens").value = settings.maxTokens ?? "";
  $("system").value = settings.system;
  $("theme").value = settings.theme;
}

function settingsChanged() {
  const temperature = $("temperature").valueAsNumber, most = $("max-tokens").valueAsNumber;
  settings = {
    temperature: temperature >= 0 ? temperature : null, maxTokens: most >= 1 ? Math.floor(most) : null,
    system: $("system").value.trim(), theme: $("theme").value, lora: $("lora").value,
  };
  writeSettings(settings);
  document.documentElement.dataset.theme = settings.theme;
}

function closeMenu() {
  $("side").classList.remove("open");
  $("menu").ariaExpanded = "false";
}

$("form").addEventListener("submit", event => {
  event.preventDefault();
  const text = $("text").value.trim();
  if ((!text && !attachedImages.length) || abort) return;
  $("text").value = "";
  say(text);
});
$("text").addEventListener("keydown", event => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); $("form").requestSubmit(); }
});
document.addEventListener("keydown", event => {
  if (event.key !== "Escape" || $("options").open) return;
  if (abort) abort.abort();
  else closeMenu();
});
$("text").addEventListener("paste", event => {
  if (!$("attach").hidden && event.clipboardData.files.length) { event.preventDefault(); attach(event.clipboardData.files); }
});
for (const kind of ["dragover", "dragleave", "drop"])
  document.addEventListener(kind, event => {
    event.preventDefault();
    $("form").classList.toggle("over", kind === "dragover" && !$("attach").hidden);
    if (kind === "drop" && !$("attach").hidden) attach(event.dataTransfer.files);
  });
$("attach").addEventListener("click", () => $("file").click());
$("file").addEventListener("change", async () => { await attach($("file").files); $("file").value = ""; });
$("stop").addEventListener("click", () => abort?.abort());
$("new").addEventListener("click", fresh);
$("fresh").addEventListener("click", fresh);
$("slide").addEventListener("click", slide);
$("export").addEventListener("click", exported);
$("settings").addEventListener("click", () => $("options").showModal());
$("options").addEventListener("change", settingsChanged);
$("menu").addEventListener("click", () => {
  $("menu").ariaExpanded = String($("side").classList.toggle("open"));
});

(async () => {
  applySettings();
  store = await Store.open();
  $("storage").hidden = Boolean(store.database);
  conversation = store.all()[0] ?? newConversation();
  redraw();
  watch();
})();
