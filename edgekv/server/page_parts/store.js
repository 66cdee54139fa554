"use strict";
// Conversations in the browser's database, settings beside; where there is none they last as long as the page.

const $ = id => document.getElementById(id);
const DEFAULTS = {temperature: 0.7, maxTokens: null, system: "", theme: "", lora: ""};

class Store {
  static async open() {
    const store = new Store();
    store.kept = new Map();
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

  async put(conversation) {
    this.kept.set(conversation.id, conversation);
    await this.run("readwrite", objects => objects.put(conversation));
  }

  async remove(id) {
    this.kept.delete(id);
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
