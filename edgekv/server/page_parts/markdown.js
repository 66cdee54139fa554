// Markdown as elements. Text only ever becomes text nodes: whatever a model writes, none of it is HTML.

const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|\*([^*\s][^*\n]*)\*|\[([^\]\n]{1,300})\]\((https?:\/\/[^\s()]{1,2000})\)/g;
// No two parts of an expression can take the same letters: a long line is read once, not once for each of its letters.
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
  const code = lines.join("\n");
  const copy = element("button", {type: "button", textContent: "Copy", ariaLabel: "Copy this code"});
  copy.addEventListener("click", () => copied(code, copy));
  const bar = element("div", {className: "bar"}, element("span", {textContent: language || "code"}), copy);
  return element("div", {className: "code"}, bar, element("pre", {tabIndex: 0}, element("code", {textContent: code})));
}

function cells(line) {
  return line.trim().replace(/^\||\|$/g, "").split("|").map(cell => cell.trim());
}

function table(lines) {
  const row = (line, kind) => element("tr", {}, cells(line).map(cell => element(kind, {}, inline(cell))));
  const body = element("tbody", {}, lines.slice(2).map(line => row(line, "td")));
  return element("table", {}, element("thead", {}, row(lines[0], "th")), body);
}

// The lines from `at` on that pass the test.
function run(lines, at, test) {
  let end = at;
  while (end < lines.length && test(lines[end])) end++;
  return lines.slice(at, end);
}

const BLOCKS = [
  [/^#{1,6} /, line => /^#{1,6} /.test(line), (taken, first) => {
    const level = first.match(/^#+/)[0].length;
    return [element(`h${Math.min(level + 1, 6)}`, {}, inline(first.slice(level + 1)))];
  }, 1],
  [/^ {0,3}([-*_])( *\1){2,} *$/, () => true, () => [element("hr")], 1],
  [/^ *[-*+] /, line => /^ *[-*+] |^ {2,}\S/.test(line), taken => [list("ul", taken, /^ *[-*+] /)]],
  [/^ *\d{1,9}[.)] /, line => /^ *\d{1,9}[.)] |^ {2,}\S/.test(line), taken => [list("ol", taken, /^ *\d{1,9}[.)] /)]],
  [/^> ?/, line => /^> ?/.test(line), taken => [
    element("blockquote", {}, inline(taken.map(line => line.replace(/^> ?/, "")).join("\n"))),
  ]],
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
      const inside = run(lines, at + 1, each => !(each.trim().startsWith(fence[1]) && !each.trim().replaceAll(fence[1][0], "")));
      made.append(codeBlock(line.slice(fence[0].length).trim().match(/^[\w+#.-]*/)[0], inside));
      at += inside.length + 2;
    } else if (block) {
      const [, goesOn, build, most] = block;
      const taken = most ? [line] : run(lines, at, goesOn);
      made.append(...build(taken, line));
      at += taken.length;
    } else if (line.includes("|") && /^[\s|:-]{2,}$/.test(lines[at + 1]) && lines[at + 1].includes("-")) {
      const taken = run(lines, at, each => each.includes("|"));
      made.append(table(taken));
      at += taken.length;
    } else {
      const taken = run(lines, at, each =>
        each.trim() && !FENCE.test(each) && (each === line || !BLOCKS.some(([begins]) => begins.test(each))));
      const parts = inline(taken.join("\n")).flatMap(part => typeof part === "string"
        ? part.split("\n").flatMap((piece, i) => i ? [element("br"), piece] : [piece]) : [part]);
      made.append(element("p", {}, parts));
      at += taken.length;
    }
  }
  return made;
}

async function copied(text, button) {
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
