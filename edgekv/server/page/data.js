"use strict";
// The page's data: conversations in the browser's database (without one, until the page is closed), settings, requests to
// the server, and attached images.

const $ = id => document.getElementById(id);

// Conversations by id; changes are saved in the database.
const conversations = new Map();
let database = null;

async function openStore() {
  database = await new Promise(resolve => {
    try {
      const request = indexedDB.open("edgekv", 1);
      request.onupgradeneeded = () => request.result.createObjectStore("conversations", {keyPath: "id"});
      request.onsuccess = () => resolve(request.result);
      request.onerror = request.onblocked = () => resolve(null);
    } catch { resolve(null); }
  });
  for (const saved of await inStore("readonly", objects => objects.getAll()) ?? []) conversations.set(saved.id, saved);
}

function inStore(mode, action) {
  return new Promise((resolve, reject) => {
    if (!database) return resolve(null);
    const transaction = database.transaction("conversations", mode);
    const request = action(transaction.objectStore("conversations"));
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

function newestFirst() { return [...conversations.values()].sort((a, b) => b.updated - a.updated); }

function readDefaults() {
  try { return checkedSettings(JSON.parse(localStorage.getItem("edgekv"))); } catch { return {}; }
}

function newConversation() {
  const now = Date.now();
  return {id: crypto.randomUUID?.() ?? `${now}-${Math.random()}`, title: "", updated: now, used: 0, messages: [], settings: readDefaults()};
}

const FORMAT = "edgekv conversations", PICTURE = /^data:image\/(?:png|jpeg);base64,[\w+/=]+$/;

// Returns the conversations of an exported file, with nothing that this page would not have written. Throws what is wrong.
function checkedExport(text) {
  let data = null;
  try { data = JSON.parse(text); } catch { /* said below */ }
  if (data?.format !== FORMAT || !Array.isArray(data.conversations)) throw new Error("it was not exported by this page");
  return data.conversations.map((talk, i) => {
    const {id, title, updated, used, messages, settings, figures} = talk ?? {}, place = `conversation ${i + 1}`;
    const isWhole = isText(id) && isText(title) && isCount(updated) && isCount(used) && Array.isArray(messages) && messages.length;
    if (!isWhole) throw new Error(`${place} has no title, time or messages`);
    return {
      id, title, updated, used, settings: checkedSettings(settings),
      figures: Object.fromEntries(FIGURES.flatMap(name => isCount(figures?.[name]) ? [[name, figures[name]]] : [])),
      messages: messages.map((message, j) => checkedMessage(message ?? {}, `message ${j + 1} of ${place}`)),
    };
  });
}

function checkedMessage({role, content, reasoning = "", images = [], dropped = false, stopped = false}, place) {
  const isKnown = ["user", "assistant"].includes(role) && isText(content) && isText(reasoning) && Array.isArray(images);
  if (!isKnown || !images.every(url => isText(url) && PICTURE.test(url))) throw new Error(`${place} is damaged`);
  return {role, content, reasoning, images, dropped: dropped === true, stopped: stopped === true};
}

function checkedSettings(settings) {
  return Object.fromEntries(Object.entries(settings ?? {}).filter(([name, value]) =>
    isSetting(name) && isText(value) && isSchema(name, value)));
}

// Returns false for a JSON schema that is no JSON object.
function isSchema(name, value) {
  if (name !== "response_format" || !value) return true;
  try { return Object.getPrototypeOf(JSON.parse(value)) === Object.prototype; } catch { return false; }
}

function settingFields() { return [...$("fields").elements].filter(field => field.name); }
function isSetting(name) { return settingFields().some(field => field.name === name); }

function isText(value) { return typeof value === "string"; }
function isCount(value) { return Number.isFinite(value) && value >= 0; }

const FAILURES = {  // by code, or by a parameter: then the server's message follows
  unreachable: "The server does not answer. Is it still running, and is this device still connected?",
  broken_off: "The connection broke off before the answer was complete.",
  queue_full: "The server is busy with other requests. Wait a little.",
  overloaded: "The server is short of memory. Wait until other answers are done, or go on in a new conversation.",
  shutting_down: "The server is shutting down. Try again once it is back.",
  interrupted: "The server was interrupted.",
  internal_error: "The server failed; its log says why.",
  invalid_api_key: "The server wants its key: enter it above.",
  response_format: "The JSON schema of this conversation can't be used: correct it in the settings.",
};

function failure({code, param, message}) {
  const text = FAILURES[param] ? `${FAILURES[param]} ${message}` : FAILURES[code] ?? message;
  return Object.assign(new Error(text), {code, param});
}

async function request(path, options) {
  const key = $("key").value, headers = {"Content-Type": "application/json", ...(key && {Authorization: `Bearer ${key}`})};
  const response = await fetch(path, {...options, headers});
  if (response.status === 401) {
    if ($("keyed").hidden) { $("keyed").hidden = false; $("key").focus(); }
    $("status").textContent = FAILURES.invalid_api_key;
  }
  return response;
}

// Yields the chunks of an answer. Throws a failure, or AbortError after the signal.
async function* answer(body, signal) {
  const options = {stream: true, stream_options: {include_usage: true}, return_progress: true, timings_per_token: true};
  const lost = code => error => { throw error.name === "AbortError" ? error : failure({code}); };
  const sent = request("/v1/chat/completions", {method: "POST", signal, body: JSON.stringify({...body, ...options})});
  const response = await sent.catch(lost("unreachable"));
  if (!response.ok) throw failure((await response.json().catch(() => null))?.error ?? {message: `The server answered ${response.status}.`});
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const {value, done} = await reader.read().catch(lost("broken_off"));
    if (done) throw failure({code: "broken_off"});
    const parts = (buffer + value).split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      if (!part.startsWith("data: ")) continue;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw failure(event.error);
      yield event;
    }
  }
}

function asApiMessage({role, content, images}) {
  const parts = (canSee() && images || []).map(url => ({type: "image_url", image_url: {url}}));
  return {role, content: parts.length ? [...parts, {type: "text", text: content}] : content};
}

function formatBytes(n) {
  const i = n ? Math.min(3, Math.floor(Math.log2(n) / 10)) : 0;
  return `${(n / 1024 ** i).toFixed(i ? 1 : 0)} ${["B", "KiB", "MiB", "GiB"][i]}`;
}

const LONGEST_SIDE = 1024, SMALL_FILE = 200_000;
let attachedImages = [];

async function attach(files) {
  if (!canSee()) $("status").textContent = "This model can't look at pictures";
  for (const file of canSee() ? files : []) {
    if (!file.type.startsWith("image/")) continue;
    try { attachedImages.push(await asUrl(file)); }
    catch { $("status").textContent = `${file.name} is no image that this browser can read`; }
  }
  showAttached();
}

async function asUrl(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = element("canvas", {width: Math.round(bitmap.width * scale), height: Math.round(bitmap.height * scale)});
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  const isExact = scale === 1 && file.size < SMALL_FILE && file.type === "image/png";
  return isExact ? canvas.toDataURL("image/png") : canvas.toDataURL("image/jpeg", 0.9);
}

function showAttached() {
  $("attached").replaceChildren(...attachedImages.map((url, i) => {
    const remove = button("×", () => { attachedImages.splice(i, 1); showAttached(); $("text").focus(); }, {ariaLabel: `Remove image ${i + 1}`});
    return element("li", {}, element("img", {src: url, alt: `Image ${i + 1}`}), remove);
  }));
}
