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

function readSettings() {
  try { return JSON.parse(localStorage.getItem("edgekv")) ?? {}; } catch { return {}; }
}

function newConversation() {
  const now = Date.now();
  return {id: crypto.randomUUID?.() ?? `${now}-${Math.random()}`, title: "", updated: now, used: 0, messages: []};
}

function serverError(error) {
  return Object.assign(new Error(error?.message ?? "the server does not answer"), {code: error?.code});
}

function headers() {
  const key = $("key").value;
  return {"Content-Type": "application/json", ...(key && {Authorization: `Bearer ${key}`})};
}

// Yields the chunks of an answer. Throws the server's error, or AbortError after the signal.
async function* answer(body, signal) {
  const options = {stream: true, stream_options: {include_usage: true}, return_progress: true, timings_per_token: true};
  const response = await fetch("/v1/chat/completions", {
    method: "POST", headers: headers(), signal, body: JSON.stringify({...body, ...options}),
  });
  if (!response.ok) throw serverError((await response.json().catch(() => null))?.error);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) return;
    const parts = (buffer + value).split("\n\n");
    buffer = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ") || part === "data: [DONE]") continue;
      const event = JSON.parse(part.slice(6));
      if (event.error) throw serverError(event.error);
      yield event;
    }
  }
}

async function fetchJson(path) {
  const response = await fetch(path, {headers: headers()});
  $("keyed").hidden = response.status !== 401 && !$("key").value;
  return response.ok ? response.json() : null;
}

function asApiMessage({role, content, images}) {
  const parts = (images ?? []).map(url => ({type: "image_url", image_url: {url}}));
  return {role, content: parts.length ? [...parts, {type: "text", text: content}] : content};
}

function formatBytes(n) {
  const i = n ? Math.min(3, Math.floor(Math.log2(n) / 10)) : 0;
  return `${(n / 1024 ** i).toFixed(i ? 1 : 0)} ${["B", "KiB", "MiB", "GiB"][i]}`;
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
