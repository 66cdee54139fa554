"use strict";
// What the page keeps, asks and sends: conversations in the browser's database (where there is none they last as long
// as the page), settings, the server's answers, images made small.

const $ = id => document.getElementById(id);
const DEFAULTS = {temperature: null, maxTokens: null, system: "", theme: "", lora: ""};

class Store {
  static async open() {
    const store = new Store();
    store.kept = new Map();
    store.removed = new Set();
    store.database = await new Promise(resolve => {
      try {
        const request = indexedDB.open("edgekv", 1);
        request.onupgradeneeded = () => request.result.createObjectStore("conversations", {keyPath: "id"});
        request.onsuccess = () => resolve(request.result);
        request.onerror = request.onblocked = () => resolve(null);
      } catch { resolve(null); }
    });
    for (const each of await store.run("readonly", objects => objects.getAll()) ?? []) store.kept.set(each.id, each);
    return store;
  }

  run(mode, action) {
    if (!this.database) return Promise.resolve(null);
    return new Promise((resolve, reject) => {
      const transaction = this.database.transaction("conversations", mode);
      const request = action(transaction.objectStore("conversations"));
      transaction.oncomplete = () => resolve(request.result);
      transaction.onerror = transaction.onabort = () => reject(transaction.error);
    });
  }

  // The latest first.
  all() { return [...this.kept.values()].sort((a, b) => b.updated - a.updated); }

  // Unless it was removed meanwhile.
  async put(conversation) {
    if (this.removed.has(conversation.id)) return;
    this.kept.set(conversation.id, conversation);
    await this.run("readwrite", objects => objects.put(conversation));
  }

  async remove(id) {
    this.kept.delete(id);
    this.removed.add(id);
    await this.run("readwrite", objects => objects.delete(id));
  }
}

function readSettings() {
  try { return {...DEFAULTS, ...JSON.parse(localStorage.getItem("edgekv") ?? "{}")}; }
  catch { return {...DEFAULTS}; }
}

function writeSettings(settings) {
  try { localStorage.setItem("edgekv", JSON.stringify(settings)); } catch { /* kept for this page */ }
}

function newConversation() {
  const now = Date.now();
  return {id: crypto.randomUUID?.() ?? `${now}-${Math.random()}`, title: "", updated: now, used: 0, messages: []};
}

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

const LONGEST_SIDE = 1024, SMALL_FILE = 200_000;
let attachedImages = [];

async function attach(files) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) continue;
    try { attachedImages.push(await asUrl(file)); }
    catch { $("status").textContent = `${file.name} is no image that this browser can read`; }
  }
  showAttached();
}

async function asUrl(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size < SMALL_FILE && ["image/png", "image/jpeg"].includes(file.type))
    return new Promise((resolve, reject) => {
      const reader = new FileReader();
      reader.onload = () => resolve(reader.result);
      reader.onerror = () => reject(reader.error);
      reader.readAsDataURL(file);
    });
  const canvas = element("canvas", {width: Math.round(bitmap.width * scale), height: Math.round(bitmap.height * scale)});
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

function showAttached() {
  $("attached").replaceChildren(...attachedImages.map((url, i) => {
    const remove = element("button", {type: "button", textContent: "×", ariaLabel: `Remove image ${i + 1}`});
    remove.addEventListener("click", () => { attachedImages.splice(i, 1); showAttached(); $("text").focus(); });
    return element("li", {}, element("img", {src: url, alt: `Image ${i + 1}`}), remove);
  }));
}

function takeAttached() {
  const taken = attachedImages;
  attachedImages = [];
  showAttached();
  return taken;
}
