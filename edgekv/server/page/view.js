// Elements for Markdown, a conversation and the list of conversations. Text becomes text nodes only: nothing that a
// model writes is HTML.

const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|\[([^\]\n]{1,300})\]\((https?:\/\/[^\s()]{1,2000})\)/g;
// No two parts of an expression match the same letters, so that matching a long line takes linear time.
const FENCE = /^ {0,3}(`{3,}(?=[^`]*$)|~{3,})/;

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  for (const child of children.flat()) made.append(child);  // as arguments they would be too many
  return made;
}

function inline(text) {
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    parts.push(text.slice(end, found.index));
    end = found.index + found[0].length;
    const [, code, bold, italic, label, link] = found;
    if (code !== undefined) parts.push(element("code", {textContent: code}));
    else if (bold !== undefined) parts.push(element("strong", {}, inline(bold)));
    else if (italic !== undefined) parts.push(element("em", {}, inline(italic)));
    else parts.push(element("a", {href: link, textContent: label, target: "_blank", rel: "noopener noreferrer"}));
  }
  parts.push(text.slice(end));
  return parts;
}

function codeBlock(language, lines) {
  const code = lines.join("\n"), copy = button("Copy", made => copyText(code, made), {ariaLabel: "Copy this code"});
  const bar = element("div", {className: "bar"}, element("span", {textContent: language || "code"}), copy);
  return element("div", {className: "code"}, bar, element("pre", {tabIndex: 0}, element("code", {textContent: code})));
}

function table(lines) {
  const cells = line => line.trim().replace(/^\||\|$/g, "").split("|").map(cell => cell.trim());
  const row = (line, kind) => element("tr", {}, cells(line).map(cell => element(kind, {}, inline(cell))));
  const body = element("tbody", {}, lines.slice(2).map(line => row(line, "td")));
  return element("table", {}, element("thead", {}, row(lines[0], "th")), body);
}

// Returns the lines from `at` on, as long as they pass the test.
function run(lines, at, test) {
  let end = at;
  while (end < lines.length && test(lines[end])) end++;
  return lines.slice(at, end);
}

// Each kind of block: its first line, its further lines (null: none), and the function that builds its element.
const BLOCKS = [
  [/^#{1,6} /, null, ([line]) => {
    const level = line.match(/^#+/)[0].length;
    return element(`h${Math.min(level + 1, 6)}`, {}, inline(line.slice(level + 1)));
  }],
  [/^ {0,3}([-*_])( *\1){2,} *$/, null, () => element("hr")],
  [/^ *[-*+] /, /^ *[-*+] |^ {2,}\S/, lines => list("ul", lines, /^ *[-*+] /)],
  [/^ *\d{1,9}[.)] /, /^ *\d{1,9}[.)] |^ {2,}\S/, lines => list("ol", lines, /^ *\d{1,9}[.)] /)],
  [/^> ?/, /^> ?/, lines => element("blockquote", {}, inline(lines.map(line => line.replace(/^> ?/, "")).join("\n")))],
];

function list(kind, lines, mark) {
  const items = [];
  for (const line of lines)
    if (mark.test(line) || !items.length) items.push(line.replace(mark, ""));
    else items[items.length - 1] += `\n${line.trim()}`;
  const made = element(kind, {}, items.map(item => element("li", {}, inline(item))));
  if (kind === "ol") made.start = parseInt(lines[0], 10) || 1;
  return made;
}

function markdown(text) {
  const made = document.createDocumentFragment(), lines = text.split("\n");
  for (let at = 0; at < lines.length;) {
    const line = lines[at], fence = line.match(FENCE);
    const block = BLOCKS.find(([begins]) => begins.test(line));
    if (!line.trim()) at++;
    else if (fence) {
      const inside = run(lines, at + 1, next => !(next.trim().startsWith(fence[1]) && !next.trim().replaceAll(fence[1][0], "")));
      made.append(codeBlock(line.slice(fence[0].length).trim().match(/^[\w+#.-]*/)[0], inside));
      at += inside.length + 2;
    } else if (block) {
      const [, goesOn, build] = block;
      const blockLines = goesOn ? run(lines, at, next => goesOn.test(next)) : [line];
      made.append(build(blockLines));
      at += blockLines.length;
    } else if (line.includes("|") && /^[\s|:-]{2,}$/.test(lines[at + 1]) && lines[at + 1].includes("-")) {
      const blockLines = run(lines, at, next => next.includes("|"));
      made.append(table(blockLines));
      at += blockLines.length;
    } else {
      const blockLines = run(lines, at, next =>
        next.trim() && !FENCE.test(next) && (next === line || !BLOCKS.some(([begins]) => begins.test(next))));
      const parts = inline(blockLines.join("\n")).flatMap(part => typeof part === "string"
        ? part.split("\n").flatMap((piece, i) => i ? [element("br"), piece] : [piece]) : [part]);
      made.append(element("p", {}, parts));
      at += blockLines.length;
    }
  }
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
  const before = button.textContent;
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = before; }, 1200);
}

const NAMES = {user: "You", assistant: "The model", error: "Error"};

function button(label, action, properties = {}) {
  const made = element("button", {type: "button", textContent: label, ...properties});
  made.addEventListener("click", () => action(made));
  return made;
}

let shown = null;  // the conversation

// Shows a conversation. error: the error of the last answer.
function show(conversation, error) {
  const last = conversation.messages.length - 1, follows = conversation !== shown || isAtEnd();
  shown = conversation;
  $("talk").replaceChildren(...conversation.messages.map((message, i) => article(message, i, i === last && !error)));
  if (error) $("talk").append(element("article", {className: "error"}, `${error.message} `, button("Try again", regenerate)));
  if (follows) scrollToEnd();
}

function article(message, i, isLast) {
  const made = element("article", {className: message.role, ariaLabel: NAMES[message.role]});
  if (message.dropped) made.classList.add("dropped");
  if (message.images?.length)
    made.append(element("div", {className: "images"}, ...message.images.map(url => element("img", {src: url, alt: "Attached image"}))));
  const body = element("div", {className: "body"});
  fill(body, message);
  const actions = element("div", {className: "actions"}, button("Copy", made => copyText(message.content, made)));
  if (message.role === "user" && !message.dropped) actions.append(button("Edit", () => edit(made, message, i)));
  if (message.role === "assistant" && isLast) actions.append(button("Regenerate", regenerate));
  made.append(body, actions);
  return made;
}

function fill(body, message) {
  if (message.role === "user") { body.textContent = message.content; return; }
  const parts = [];
  if (message.reasoning)
    parts.push(element("details", {open: !message.content}, element("summary", {textContent: "Reasoning"}), message.reasoning));
  body.replaceChildren(...parts, markdown(message.content));
}

function edit(article, message, i) {
  const area = element("textarea", {className: "editor", value: message.content, rows: 3, ariaLabel: "Edit the message"});
  const done = () => { if (area.value.trim()) editMessage(i, area.value.trim()); };
  area.addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); done(); }
    if (event.key === "Escape") { event.stopPropagation(); redraw(); }
  });
  const actions = element("div", {className: "actions"}, button("Send again", done), button("Cancel", () => redraw()));
  article.replaceChildren(area, actions);
  area.focus();
}

// Adds an element for a new answer; returns a function that shows its growing message.
function startAnswer() {
  const body = element("div", {className: "body"});
  $("talk").append(element("article", {className: "assistant", ariaLabel: NAMES.assistant}, body));
  scrollToEnd();
  let frame = 0;
  return message => {
    frame ||= requestAnimationFrame(() => {
      frame = 0;
      const follows = isAtEnd();
      fill(body, message);
      if (follows) scrollToEnd();
    });
  };
}

// Returns whether the end is in view, so that new text is scrolled to.
function isAtEnd() {
  const talk = $("talk");
  return talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
}

function scrollToEnd() { $("talk").scrollTo({top: $("talk").scrollHeight, behavior: "instant"}); }

function showList(conversations, current) {
  $("list").replaceChildren(...conversations.map(talk => {
    const title = talk.title || "New conversation", isCurrent = talk.id === current;
    return element("li", {className: isCurrent ? "current" : ""},
      button(title, () => openTalk(talk.id), {className: "title", title, ariaCurrent: isCurrent ? "true" : null}),
      button("✎", () => rename(talk), {className: "small", ariaLabel: `Rename ${title}`}),
      button("×", () => remove(talk), {className: "small", ariaLabel: `Delete ${title}`}));
  }));
}
