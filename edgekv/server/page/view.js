// Elements for a conversation and the list of conversations.

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  for (const child of children.flat()) made.append(child);  // as arguments they would be too many
  return made;
}

async function copyText(text, button) {
  try { await navigator.clipboard.writeText(text); }
  catch {  // no permission, or plain HTTP
    const area = element("textarea", {value: text});
    document.body.append(area);
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 1200);
}

const NAMES = {user: "You", assistant: "The model", error: "Error"};

function button(label, action, properties = {}) {
  const made = element("button", {type: "button", textContent: label, ...properties});
  made.addEventListener("click", () => action(made));
  return made;
}

let shown = null;  // the conversation

// Shows a conversation. error: the failure of the last answer.
function show(conversation, error) {
  const last = conversation.messages.length - 1, follows = conversation !== shown || isAtEnd();
  shown = conversation;
  $("talk").replaceChildren(...conversation.messages.map((message, i) => article(message, i, i === last && !error)));
  if (last < 0) $("talk").append(props ? welcome() : LOADING);
  if (error) $("talk").append(failed(error));
  if (follows) scrollToEnd();
}

function failed({message, code, param}) {
  const made = element("article", {className: "error", role: "alert"}, element("p", {textContent: message}));
  if (isSetting(param)) made.append(button("Settings", openSettings), " ");
  if (code !== "context_length_exceeded") made.append(button("Try again", regenerate));
  return made;
}

const LOADING = document.querySelector(".welcome");
const EXAMPLES = ["Explain in three sentences why the sky is blue.", "Plan a simple dinner for four, with a shopping list."];

// Returns what an empty conversation shows: what the model is, what it can't do, and two things to try.
function welcome() {
  const {note, examples, ctx, model_alias: name} = props, about = note || `${name} answers what you write. Like any model, it can be wrong`;
  const limits = `It keeps up to ${ctx} tokens of a conversation in mind, about ${Number((ctx * 0.75).toPrecision(2))} words, and ${canSee() ? "looks at" : "can't look at"} pictures.`;
  const privacy = "What you write goes to this server only; conversations are kept in this browser.";
  return element("section", {className: "welcome"}, element("h2", {textContent: name}),
    element("p", {textContent: `${about[0].toUpperCase()}${about.slice(1)}. ${limits} ${privacy}`}), element("p", {textContent: "Two things to try:"}),
    (examples.length ? examples : EXAMPLES).map(text => button(text, () => tryOut(text, examples.length && canSee()))));
}

// Asks an example; one that is about a picture waits for it in the message box.
function tryOut(text, needsPicture) {
  if (!needsPicture) return say(text);
  $("text").value = text;
  $("attach").click();
}

function article(message, i, isLast) {
  const made = element("article", {className: message.role, ariaLabel: NAMES[message.role]});
  if (message.dropped) made.classList.add("dropped");
  if (message.images?.length) {
    made.append(element("div", {className: "images"}, ...message.images.map(url => element("img", {src: url, alt: "Attached image"}))));
    if (props && !canSee()) made.append(element("p", {className: "hint", textContent: "not sent: this model can't look at pictures"}));
  }
  const actions = element("div", {className: "actions"}, button("Copy", made => copyText(message.content, made)));
  if (message.role === "user" && !message.dropped) actions.append(button("Edit", () => edit(made, message, i), {title: "Change this message and go on from here"}));
  if (isLast && !abort) actions.append(button("Try again", regenerate, {title: "Answer anew"}));
  made.append(bodyOf(message));
  if (message.stopped) made.append(element("p", {className: "hint", textContent: "stopped"}));
  made.append(actions);
  return made;
}

const BODIES = new WeakMap();  // by message: what a complete one looks like, which is made once

function bodyOf(message) {
  if (message.role === "user") return element("div", {className: "body", textContent: message.content});
  const made = element("div", {className: "body"}), key = `${message.reasoning ?? ""}\0${message.content}`;
  if (BODIES.get(message)?.key === key) return BODIES.get(message).made;
  if (message.reasoning) made.append(element("details", {}, element("summary", {textContent: "Reasoning"}), message.reasoning));
  made.append(markdown(message.content));
  BODIES.set(message, {key, made});
  return made;
}

function edit(article, message, i) {
  const area = element("textarea", {className: "editor", value: message.content, rows: 3, ariaLabel: "Edit the message"});
  const done = () => { if (area.value.trim()) say(area.value.trim(), i); };
  area.addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); done(); }
    if (event.key === "Escape") { event.stopPropagation(); redraw(); }
  });
  const actions = element("div", {className: "actions"}, button("Send again", done), button("Cancel", () => redraw()));
  article.replaceChildren(area, actions);
  area.focus();
}

const RENDER_MS = 100, RENDER_SHARE = 4;  // between two renderings of an answer: at least so long, and so many times its own time

// Adds an element for a new answer; returns a function that shows its growing message.
function startAnswer() {
  const thought = new Text(), details = element("details", {hidden: true, open: true}, element("summary", {textContent: "Reasoning"}), thought);
  const body = element("div", {className: "body"}), grow = growingMarkdown(body);
  $("talk").append(element("article", {className: "assistant", ariaLabel: NAMES.assistant}, details, body));
  scrollToEnd();
  let timer = 0, wait = 0;
  return message => {
    timer ||= setTimeout(() => {
      const begun = performance.now(), follows = isAtEnd();
      thought.data = message.reasoning;
      details.hidden = !message.reasoning;
      grow(message.content);
      if (follows) scrollToEnd();
      wait = Math.max(RENDER_MS, RENDER_SHARE * (performance.now() - begun));
      timer = 0;
    }, wait);
  };
}

// Returns whether the end is in view, so that new text is scrolled to.
function isAtEnd() { return $("talk").scrollHeight - $("talk").scrollTop - $("talk").clientHeight < 60; }

function scrollToEnd() { $("talk").scrollTo({top: $("talk").scrollHeight, behavior: "instant"}); }

function showList(conversations, current) {
  $("list").replaceChildren(...conversations.map(talk => {
    const title = talk.title || "New conversation", isCurrent = talk.id === current;
    return element("li", {className: isCurrent ? "current" : ""},
      button(title, () => openTalk(talk.id), {className: "title", title, ariaCurrent: isCurrent ? "true" : null}),
      button("✎", () => rename(talk), {ariaLabel: `Rename ${title}`, title: "Rename"}),
      button("×", () => remove(talk), {ariaLabel: `Delete ${title}`, title: "Delete"}));
  }));
}
